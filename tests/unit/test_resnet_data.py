"""Images in memory, drawn or decoded: the same pixels whoever asks, from whichever kind of tree."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dtf.core.errors import ConfigError, DataError
from dtf.recipes.resnet import cache, decode, tree
from dtf.recipes.resnet.options import FolderOptions, ModelOptions
from dtf.recipes.resnet.recipe import ResnetFolder

CLASSES = ("ant", "bee", "cow")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """4 training and 2 validation images of 12 x 12 pixels in each of 3 classes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for kind in CLASSES:
            place = tmp_path / "tree" / split / kind
            place.mkdir(parents=True)
            for row in range(count):
                Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8)).save(place / f"{row}.jpg")
    return tmp_path / "tree"


@pytest.fixture
def recipe(folder: Path, tmp_path: Path) -> ResnetFolder:
    return ResnetFolder(
        model=ModelOptions(classes=3), data=FolderOptions(root=str(folder), cache=str(tmp_path / "cache"), pixels=12)
    )


def pack(folder: Path, archive: Path, inside: str, mode: str, reverse: bool = False) -> Path:
    files = sorted((path for path in folder.rglob("*") if path.is_file()), reverse=reverse)
    with tarfile.open(archive, mode) as out:  # type: ignore[call-overload]
        for file in files:
            out.add(file, f"{inside}{file.relative_to(folder)}")
    return archive


def everything(recipe: ResnetFolder, split: str = "train", epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    data = recipe.open_data(split, seed=0)
    return data.fetch(np.arange(len(data)), epoch)


# ---------------------------------------------------------------- the rows


@pytest.mark.parametrize(
    ("inside", "mode", "reverse"),
    [("", "w", False), ("top/", "w:gz", True), ("./top/", "w:xz", False), ("./", "w", True)],
)
def test_an_archive_equals_the_folder_it_was_made_of(
    recipe: ResnetFolder, folder: Path, tmp_path: Path, inside: str, mode: str, reverse: bool
) -> None:
    recipe.check()
    expected = {
        split: (*everything(recipe, split), recipe.open_data(split, 0).fingerprint()) for split in ("train", "eval")
    }
    assert expected["train"][1].tolist() == [0] * 4 + [1] * 4 + [2] * 4 and len(expected["eval"][1]) == 6
    recipe.data.root = str(pack(folder, tmp_path / "packed.tar", inside, mode, reverse))
    recipe.check()
    for split, (inputs, targets, fingerprint) in expected.items():
        found = everything(recipe, split)
        assert found[0].equal(inputs) and found[1].equal(targets)
        assert recipe.open_data(split, 0).fingerprint() == fingerprint


def test_a_folder_above_the_splits_is_allowed(recipe: ResnetFolder, folder: Path) -> None:
    expected = everything(recipe)[0]
    recipe.data.root = str(folder.parent)
    recipe.check()
    assert everything(recipe)[0].equal(expected)


def test_pixels_are_those_of_the_file(recipe: ResnetFolder, folder: Path) -> None:
    data = recipe.open_data("eval", 0)
    assert (data._pixels[3] == np.asarray(Image.open(folder / "val" / "bee" / "1.jpg"))).all()


def test_images_of_another_size_are_resized_and_cut_to_their_centre(recipe: ResnetFolder, folder: Path) -> None:
    stripes = np.zeros((20, 60, 3), np.uint8)
    stripes[:, 20:40] = (250, 120, 10)
    Image.fromarray(stripes).save(folder / "val" / "ant" / "0.png")
    (folder / "val" / "ant" / "0.jpg").unlink()
    pixels = recipe.open_data("eval", 0)._pixels[0].astype(int)
    assert pixels.shape == (12, 12, 3)
    assert np.abs(pixels[:, 1:-1] - (250, 120, 10)).max() <= 3  # the border mixes with its neighbours


def test_grey_images_become_red_green_and_blue(recipe: ResnetFolder, folder: Path) -> None:
    Image.new("L", (12, 12), 77).save(folder / "val" / "ant" / "0.jpg")
    assert np.abs(recipe.open_data("eval", 0)._pixels[0].astype(int) - 77).max() <= 1


def test_rows_can_be_limited(recipe: ResnetFolder) -> None:
    recipe.data.train_rows, recipe.data.eval_rows = 6, 3
    recipe.check()
    assert everything(recipe)[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert everything(recipe, "eval")[1].tolist() == [0, 1, 2]


def break_tree(folder: Path, how: str) -> None:
    match how:
        case "no val":
            shutil.rmtree(folder / "val")
        case "no images":
            for file in (folder / "train").rglob("*.jpg"):
                file.unlink()
                file.with_suffix(".txt").write_text("no image")
        case "unknown class":
            (folder / "val" / "cow").rename(folder / "val" / "dog")
        case "no class folder":
            (folder / "train" / "ant" / "0.jpg").rename(folder / "train" / "0.jpg")
        case "too deep":
            (folder / "train" / "ant" / "more").mkdir()
            (folder / "train" / "ant" / "0.jpg").rename(folder / "train" / "ant" / "more" / "0.jpg")
        case "two trees":
            shutil.copytree(folder / "train", folder / "b" / "train")
        case "missing":
            shutil.rmtree(folder)
        case "empty":
            shutil.rmtree(folder)
            folder.mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no val", r"has no images in val/ \(12 images in all\)"),
        ("no images", r"has no images in train/ \(6 images in all\)"),
        ("unknown class", "classes of val/ that train/ does not have: dog"),
        ("no class folder", r"train/0.jpg is not of the form"),
        ("too deep", r"train/ant/more/0.jpg is not of the form"),
        ("two trees", "holds several trees, under '', 'b'"),
        ("missing", "does not exist; give a folder or"),
        ("empty", r"has no images in train/ \(0 images in all\)"),
    ],
)
def test_a_wrong_tree_is_refused_before_launch(recipe: ResnetFolder, folder: Path, how: str, message: str) -> None:
    break_tree(folder, how)
    with pytest.raises(DataError, match=f"recipe.data.root=.*{message}"):
        recipe.check()


def test_values_that_do_not_fit_the_tree_are_refused(recipe: ResnetFolder, tmp_path: Path) -> None:
    recipe.model.classes = 10
    with pytest.raises(ConfigError, match=r"recipe.model.classes=10, but .* has 3 classes; set recipe.model.classes=3"):
        recipe.check()
    recipe.model.classes, recipe.data.eval_rows = 3, 7
    with pytest.raises(ConfigError, match=r"recipe.data.eval_rows=7, but val/ has 6 images"):
        recipe.check()
    recipe.data.eval_rows, recipe.data.std = 0, [0.1, 0.1]
    with pytest.raises(ConfigError, match=r"recipe.data.std="):
        recipe.check()
    recipe.data.std, recipe.data.root = [1.0, 1.0, 1.0], ""
    with pytest.raises(ConfigError, match=r"recipe.data.root is not set"):
        recipe.check()


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("damage", ["cut", "flip", "no archive"])
def test_a_damaged_archive_is_refused_before_launch(
    recipe: ResnetFolder, folder: Path, tmp_path: Path, mode: str, damage: str
) -> None:
    archive = pack(folder, tmp_path / "packed.tar", "", mode)
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        header = content.find(b"train/cow") if mode == "w" else len(content) // 2
        content[header + 1] ^= 0xFF
    else:
        content = bytearray(b"no archive at all")
    archive.write_bytes(content)
    recipe.data.root = str(archive)
    with pytest.raises(DataError, match=r"packed.tar is no readable tar archive"):
        recipe.check()


def test_a_file_twice_in_an_archive_is_refused(recipe: ResnetFolder, folder: Path, tmp_path: Path) -> None:
    archive = pack(folder, tmp_path / "packed.tar", "", "w")
    with tarfile.open(archive, "a") as out:
        out.add(folder / "val" / "ant" / "0.jpg", "val/ant/0.jpg")
    recipe.data.root = str(archive)
    with pytest.raises(DataError, match=r"a file of val/ occurs twice"):
        recipe.check()


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "it is empty"), (b"no image", "8 bytes that are no image"), (None, "truncated|Truncated")],
)
def test_a_file_that_cannot_be_decoded_is_named(
    recipe: ResnetFolder, folder: Path, content: bytes | None, why: str
) -> None:
    file = folder / "train" / "bee" / "2.jpg"
    file.write_bytes(file.read_bytes()[:400] if content is None else content)
    recipe.check()  # only decoding can tell
    with pytest.raises(DataError, match=rf"train/bee/2.jpg \(\d+ bytes\) cannot be decoded: .*({why})"):
        recipe.open_data("train", 0)
    assert not list(Path(recipe.data.cache).glob("*/meta.json"))


# ---------------------------------------------------------------- the cache


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Roots in the order they were decoded."""
    seen: list[Path] = []
    original = decode.decode_tree

    def counted(root: Path, found: tree.Tree, pixels: int, outputs: dict[str, Path]) -> None:
        seen.append(root)
        original(root, found, pixels, outputs)

    monkeypatch.setattr(decode, "decode_tree", counted)
    return seen


def test_images_are_decoded_once(recipe: ResnetFolder, decodings: list[Path]) -> None:
    first = everything(recipe)[0]
    assert everything(recipe)[0].equal(first) and len(everything(recipe, "eval")[0]) == 6
    recipe.check()
    assert len(decodings) == 1


def test_a_changed_file_or_another_size_is_decoded_anew(
    recipe: ResnetFolder, folder: Path, decodings: list[Path]
) -> None:
    before = everything(recipe)[0]
    file = folder / "train" / "ant" / "0.jpg"
    Image.new("RGB", (12, 12), (255, 0, 0)).save(file)
    os.utime(file, ns=(1, 1))
    after = everything(recipe)[0]
    assert not after[0].equal(before[0]) and after[1:].equal(before[1:])
    recipe.data.pixels = 8
    assert everything(recipe)[0].shape[-1] == 8
    assert len(decodings) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "meta", "meta type", "gone"])
def test_a_damaged_cache_is_decoded_anew(recipe: ResnetFolder, decodings: list[Path], damage: str) -> None:
    expected = everything(recipe)[0]
    place = cache.location(recipe.data.places()[0], 12, recipe.data.places()[1], "train")
    pixels = place / "train.u8"
    content = bytearray(pixels.read_bytes())
    match damage:
        case "flip":
            content[100] ^= 1
            pixels.write_bytes(content)
        case "cut":
            pixels.write_bytes(content[:-1])
        case "meta":
            (place / "meta.json").write_text("{")
        case "meta type":
            (place / "meta.json").write_text('{"classes": 3, "counts": [], "digests": null}')
        case "gone":
            pixels.unlink()
    assert everything(recipe)[0].equal(expected)
    assert len(decodings) == 2
    assert everything(recipe)[0].equal(expected) and len(decodings) == 2


def test_what_a_killed_process_left_behind_is_cleared_away(recipe: ResnetFolder, decodings: list[Path]) -> None:
    root, store = recipe.data.places()
    place = cache.location(root, 12, store, "train")
    stale = place.with_name(f"{place.name}.tmp")
    stale.mkdir(parents=True)
    (stale / "train.u8").write_bytes(b"half")
    place.with_name(f"{place.name}.lock").touch()
    recipe.check()
    assert len(everything(recipe)[0]) == 12
    assert not stale.exists()


def test_ranks_that_start_together_decode_once(recipe: ResnetFolder, decodings: list[Path]) -> None:
    ready = threading.Barrier(4)

    def rank(_: int) -> torch.Tensor:
        ready.wait(timeout=30)
        return everything(recipe)[0]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rank, range(4)))
    assert all(result.equal(results[0]) for result in results)
    assert len(decodings) == 1


def test_a_cache_that_cannot_be_written_is_refused_before_launch(recipe: ResnetFolder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recipe.data.cache = str(tmp_path / "file" / "cache")
    with pytest.raises(DataError, match=r"recipe.data.cache=.*/file/cache cannot be written"):
        recipe.check()
    with pytest.raises(DataError, match=r"recipe.data.cache=.*/file/cache cannot be written"):
        recipe.open_data("train", 0)


def test_a_full_disk_is_a_data_error_and_leaves_no_cache(recipe: ResnetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.os, "pwrite", lambda file, content, offset: len(content) - 1)
    with pytest.raises(DataError, match=r"recipe.data.cache=.* cannot be written: No space left on device"):
        recipe.open_data("train", 0)
    monkeypatch.undo()
    assert len(everything(recipe)[0]) == 12


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.default_cache() == Path("/somewhere/dtf/images")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_cache() == Path.home() / ".cache" / "dtf" / "images"


def test_only_the_files_asked_for_are_read_from_an_archive(folder: Path, tmp_path: Path) -> None:
    archive = pack(folder, tmp_path / "packed.tar.gz", "", "w:gz")
    found = tree.read_tree(archive)
    wanted = [found.files["val"][2]]
    assert [(name, Image.open(io.BytesIO(content)).size) for name, content in tree.read_files(archive, wanted, {})] == [
        (wanted[0], (12, 12))
    ]
