"""Image files as the world has them: each is used as what it is, or named; nothing depends on its name."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from dtf.core.errors import DataError
from dtf.data import image_formats
from dtf.data.decode_any import decode_any
from dtf.engine.row_notes import left_out_text
from dtf.recipes.resnet import jpeg
from dtf.recipes.resnet.decode import decode_image
from dtf.recipes.resnet.listing import Judgements, list_folder
from dtf.recipes.resnet.options import FolderOptions, ModelOptions
from dtf.recipes.resnet.photo_recipe import BadRecords
from dtf.recipes.resnet.recipe import ResnetFolder
from dtf.recipes.resnet.store import read_index
from tests.support.image_files import encode, packed, picture, tree
from tests.support.odd_images import BAD, LEFT_OUT, LOSSLESS, MODES, known, odd_files, saved, turned, write
from tests.unit.test_photos import recipe

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.mark.parametrize("who", ["photos", "squares"])
def test_each_odd_file_is_used_or_named(who: str, tmp_path: Path) -> None:
    files = list(odd_files())
    assert len(files) >= 332 and len({file.name for file in files}) == len(files)
    folder = tmp_path / "inputs"
    write(folder, files)
    task = recipe(tree(tmp_path / "t"))
    if who == "squares":
        task = ResnetFolder(model=ModelOptions(classes=2), data=FolderOptions(root=str(tmp_path), pixels=32))
    names, rows = task.open_inputs(folder)
    rows.allowed = len(rows)
    for first in range(0, len(rows), 64):
        rows.fetch(np.arange(first, min(first + 64, len(rows))), 0)
    found = {name: BAD if row in rows.bad else "used" for row, name in enumerate(names)}
    assert found.keys().isdisjoint(rows.left_out)
    found |= dict.fromkeys(rows.left_out, LEFT_OUT)
    assert found == {file.name: file.fate for file in files}
    assert all(why.partition(": ")[2] for why in rows.bad.values()) and all(rows.left_out.values())


def test_what_is_left_out_is_counted_by_kind_and_reason() -> None:
    left_out = {f"a/{n}.heic": "no image" for n in range(6)} | {"b.txt": "no image", "c": "empty", ".x": "hidden"}
    left_out |= {"d": "a link that leads nowhere, to /e", "f": "a link that leads nowhere, to /g", "h.jpg/": "too deep"}
    assert left_out_text(left_out) == (
        "6 .heic, 1 .txt (no image); 2 without suffix (a link that leads nowhere); 1 without suffix (empty); 1 .x "
        "(hidden); 1 folder (too deep)"
    )
    many = {f"x.{n}": "no image" for n in range(20)}
    assert left_out_text(many).endswith("1 .7, 12 others (no image)") or "12 others (no image)" in left_out_text(many)


@pytest.mark.parametrize("kind", [kind for kind in LOSSLESS if known(kind)])
def test_lossless_files_have_the_pixels_that_pillow_shows(kind: str) -> None:
    for mode in MODES[kind]:
        content = saved(kind, mode)
        assert image_formats.is_image(content, lambda content=content: content)
        if mode == "I;16":
            grey = np.asarray(Image.fromarray(picture(40, 60)).convert("L"))
            expected = np.repeat(grey[..., None], 3, axis=2)
        else:
            expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        assert np.array_equal(decode_any(content), expected), mode


@pytest.mark.parametrize("kind", [kind for kind in ("JPEG", "PNG", "TIFF", "WEBP", "AVIF", "MPO") if known(kind)])
def test_pictures_are_turned_as_their_tag_says(kind: str) -> None:
    """1 to 8; other numbers mean nothing. Alike where a fast path might have read the file."""
    upright = decode_any(saved(kind, "RGB"))
    for orientation in range(10):
        content = turned(kind, orientation)
        turn = TURNS.get(orientation)
        expected = np.asarray(Image.fromarray(upright).transpose(turn)) if turn is not None else upright
        assert np.array_equal(decode_any(content), expected), orientation
        header = jpeg.read_header(content) if kind == "JPEG" else None
        assert (header is None) == (kind != "JPEG" or orientation > 1)
        if header is not None:
            assert np.array_equal(simplejpeg.decode_jpeg(content), expected)


def test_the_fast_path_leaves_whatever_may_be_turned_to_pillow() -> None:
    files = {file.name: file.content for file in odd_files() if file.name.startswith("turned/")}
    for name in ("II_3", "MM_3", "II_4", "MM_4", "xmp"):
        content = files[f"turned/{name}.jpg"]
        assert jpeg.read_header(content) is None and decode_any(content).shape == (60, 40, 3), name
    damaged = files["turned/damaged.jpg"]
    assert jpeg.read_header(damaged) is not None and decode_any(damaged).shape == (40, 60, 3)
    for text in (b'tiff:Orientation="1"', b"<tiff:Orientation>1</tiff:Orientation>", b"Orientation"):
        assert jpeg.read_header(saved("JPEG", "RGB", xmp=text)) is not None, "as picture editors write it"
    plain = saved("JPEG", "RGB", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    assert jpeg.read_header(plain) is not None
    at = plain.index(b"\xff\xe1")
    segment = plain[at : at + 2 + int.from_bytes(plain[at + 2 : at + 4], "big")]
    assert jpeg.read_header(plain[:at] + segment + plain[at:]) is None, "Exif data in two parts"


def test_both_readers_of_a_preview_refuse_it() -> None:
    out = io.BytesIO()
    Image.fromarray(picture(20, 30)).save(out, "TIFF", tiffinfo={254: 1})
    with pytest.raises(ValueError, match="its first picture is a preview"):
        decode_any(out.getvalue())


def test_bits_beyond_eight_are_the_high_byte() -> None:
    deep = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    for kind in ("PNG", "TIFF", "JPEG2000"):
        out = io.BytesIO()
        Image.fromarray(deep).save(out, kind)
        assert np.array_equal(decode_any(out.getvalue())[..., 1], deep >> 8), kind
    maximum = b"P5 32 32 65535\n" + deep.astype(">u2").tobytes()
    assert np.array_equal(decode_any(maximum)[..., 2], deep >> 8)


# ---------------------------------------------------------------- trees


def odd_tree(folder: Path) -> Path:
    root = tree(folder)
    (root / "train/c0/0.jpg").rename(root / "train/c0/0")  # no suffix
    (root / "train/c1/1.jpg").write_bytes(encode(picture(30, 40), "BMP"))
    (root / "val/c0/picture.txt").write_bytes(encode(picture(30, 40), "WEBP"))
    (root / "val/c0/notes.txt").write_text("no picture")
    (root / "val/c1/.hidden.jpg").write_bytes(b"")
    (root / "cover.png").write_bytes(encode(picture(30, 40), "PNG"))
    (root / "test").mkdir()
    (root / "test/without_class.jpg").write_bytes(encode(picture(9, 9)))
    return root


@pytest.mark.parametrize("name", ["folder", "t.tar", "t.tar.gz"])
def test_content_counts_in_trees_and_archives(name: str, tmp_path: Path) -> None:
    root = odd_tree(tmp_path / "t")
    source = root if name == "folder" else packed(root, tmp_path / name)
    top = "" if name == "folder" else "top/"
    for _ in range(2):  # listed, then from what is kept
        data = recipe(source).open_data("eval", 0)
        assert data._store.names[2] == f"{top}val/c0/picture.txt"  # type: ignore[attr-defined]
        assert len(data) == 5 and len(recipe(source).open_data("train", 0)) == 8
        assert data.left_out == {
            f"{top}val/c0/notes.txt": "no image",
            f"{top}val/c1/.hidden.jpg": "hidden",
            f"{top}cover.png": "beside train/, val/ and test/",
        }
        assert data.fetch(np.arange(5), 0)[0]["pixels"].float().std(dim=(1, 2, 3)).min() > 5
    squares = ResnetFolder(
        model=ModelOptions(classes=2),
        data=FolderOptions(root=str(source), cache=str(tmp_path / "cache"), pixels=12, crop_pad=0),
    )
    squares.check()
    assert len(squares.open_data("eval", 0)) == 5 and squares.open_data("eval", 0).left_out == data.left_out


def test_files_that_say_nothing_by_name_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, looked = odd_tree(tmp_path / "t"), list[int]()
    real = image_formats.is_image
    monkeypatch.setattr(
        "dtf.recipes.resnet.listing.is_image", lambda head, content: (looked.append(1), real(head, content))[1]
    )
    first = read_index(root, tmp_path / "cache").tree
    assert len(looked) == 3 and read_index(root, tmp_path / "cache").tree == first and len(looked) == 3
    (root / "val/c0/notes.txt").write_bytes(encode(picture(30, 40), "GIF"))
    assert read_index(root, tmp_path / "cache").tree.counts["val"] == (4, 2) and len(looked) == 4
    kept = next((tmp_path / "cache").glob("*.files.json"))
    for text in ("{", "[]", '{"val/c0/notes.txt": 3}', '{"val/c0/notes.txt": [1, 2, "no image"]}'):
        kept.write_text(text)
        assert read_index(root, tmp_path / "cache").tree.counts["val"] == (4, 2)


def link(archive: tarfile.TarFile, name: str, target: str, symbolic: bool = True) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = (tarfile.SYMTYPE if symbolic else tarfile.LNKTYPE), target
    archive.addfile(member)


def file(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def linked_archive(path: Path) -> Path:
    secret = path.parent / "secret.jpg"
    secret.write_bytes(encode(picture(20, 20)))
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        link(archive, "train/c0/early.jpg", "../../store/a.bin")  # before what it leads to
        for n in range(3):
            file(archive, f"store/{'abc'[n]}.bin", encode(picture(30, 40, n)))
            file(archive, f"train/c0/{n}.jpg", encode(picture(30, 40, 10 + n)))
            file(archive, f"train/c1/{n}.jpg", encode(picture(30, 40, 20 + n)))
        file(archive, "store/notes", b"no image")
        link(archive, "train/c0/hard.jpg", "store/b.bin", symbolic=False)
        link(archive, "train/c0/chain.png", "early.jpg")
        link(archive, "train/c1/plain", "../../store/c.bin")
        link(archive, "train/c1/words", "../../store/notes")
        link(archive, "val", "./train")
        link(archive, "train/c1/up", "..")
        link(archive, "train/c0/bad_out.jpg", str(secret))
        link(archive, "train/c0/bad_up.jpg", f"../../../{path.parent.name}/secret.jpg")
        link(archive, "train/c0/bad_gone.jpg", "gone.jpg")
        link(archive, "train/c0/bad_hard.jpg", "gone.jpg", symbolic=False)
        link(archive, "train/c0/bad_circle.jpg", "bad_circle2.jpg")
        link(archive, "train/c0/bad_circle2.jpg", "bad_circle.jpg")
    return path


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz"])
def test_links_in_archives_are_followed_inside_or_named(name: str, tmp_path: Path) -> None:
    archive = linked_archive(tmp_path / name)
    for _ in range(2):
        task = recipe(archive, bad_records=BadRecords["skip"], bad_share=1.0)
        task.check()
        data = task.open_data("eval", 0)
        names = data._store.names  # type: ignore[attr-defined]
        good = ["0.jpg", "1.jpg", "2.jpg", "chain.png", "early.jpg", "hard.jpg"]
        bad = ["bad_circle.jpg", "bad_circle2.jpg", "bad_gone.jpg", "bad_hard.jpg", "bad_out.jpg", "bad_up.jpg"]
        c0 = [f"val/c0/{one}" for one in sorted(good + bad)]
        assert list(names) == [*c0, *(f"val/c1/{one}" for one in ("0.jpg", "1.jpg", "2.jpg", "plain"))]
        pixels = data.fetch(np.arange(len(names)), 0)[0]["pixels"]
        assert sorted(names[row].rpartition("/")[2] for row in data.bad) == bad
        assert {why.partition(": ")[2].partition(",")[0] for why in data.bad.values()} == {
            "a link in a circle",
            "a link that leads nowhere in the archive",
            "a link that leads out of the archive",
        }
        place = {one: row for row, one in enumerate(names)}
        assert torch.equal(pixels[place["val/c0/chain.png"]], pixels[place["val/c0/early.jpg"]])
        left_out = data.left_out
        assert left_out["train/c1/up/"] == "a link in a circle" and left_out["train/c1/words"] == "no image"
    with pytest.raises(DataError, match=r"bad_.*jpg cannot be used: a link .*recipe.data.bad_records=skip"):
        recipe(archive).check()


def test_links_in_archives_lead_to_the_same_pixels_as_in_folders(tmp_path: Path) -> None:
    archive, folder = linked_archive(tmp_path / "t.tar"), tmp_path / "unpacked"
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="fully_trusted", members=[m for m in file if "bad_" not in m.name])
    seen = []
    for source in (archive, folder):
        data = recipe(source, bad_records=BadRecords["skip"], bad_share=1.0).open_data("eval", 0)
        rows = [row for row, name in enumerate(data._store.names) if "bad_" not in name]  # type: ignore[attr-defined]
        seen.append(data.fetch(np.array(rows), 0)[0]["pixels"])
    assert torch.equal(*seen)


def test_a_sparse_file_of_an_archive_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    archive = packed(root, tmp_path / "t.tar")
    content = bytearray(archive.read_bytes())
    at = content.index(b"top/train/c0/0.jpg")
    content[at + 156 : at + 157] = b"S"
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    archive.write_bytes(content)
    with pytest.raises(DataError, match="0.jpg cannot be used: a sparse file"):
        recipe(archive).check()


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz"])
def test_a_hole_in_an_archive_is_not_its_end(name: str, tmp_path: Path) -> None:
    content = packed(tree(tmp_path / "t"), tmp_path / "t.tar").read_bytes()
    with tarfile.open(tmp_path / "t.tar") as file:
        hole = file.getmember("top/train/c0/1.jpg").offset
    holed = content[:hole] + bytes(12288) + content[hole + 12288 :]
    (tmp_path / name).write_bytes(gzip.compress(holed) if name.endswith(".gz") else holed)
    with pytest.raises(DataError, match=rf"no readable tar archive: it breaks off, is damaged, .* at byte {hole};"):
        read_index(tmp_path / name, tmp_path / "cache")


def test_what_listing_knows_to_be_bad_is_said_before_the_start(tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    (root / "val/c0/gone.jpg").symlink_to("nowhere")
    with pytest.raises(DataError, match="val/c0/gone.jpg cannot be used: a link that leads nowhere, to nowhere"):
        recipe(root).check()
    recipe(root, bad_records=BadRecords["skip"]).check()


def test_links_in_folders_are_followed_wherever_they_lead(tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    (root / "val/c0").rename(tmp_path / "elsewhere")
    (root / "val/c0").symlink_to(tmp_path / "elsewhere")
    (root / "train/c0/again.jpg").symlink_to(tmp_path / "elsewhere" / "0.jpg")
    task = recipe(root)
    task.check()
    assert len(task.open_data("eval", 0)) == 4 and len(task.open_data("train", 0)) == 9


@pytest.mark.parametrize("who", ["photos", "squares"])
def test_a_folder_to_evaluate_needs_no_train(who: str, tmp_path: Path) -> None:
    """Labels are those of the model, by name."""
    from dtf.api.recipe import Split

    root = tree(tmp_path / "t", classes=3)
    (root / "val").rename(root / "test")
    (root / "train").rename(tmp_path / "train")
    (root / "test/c1").rename(tmp_path / "c1")
    options: dict[str, Any] = {"root": str(root), "cache": str(tmp_path / "cache")}
    task = recipe(root)
    if who == "squares":
        task = ResnetFolder(data=FolderOptions(**options))
    task.model = ModelOptions(classes=3)
    with pytest.raises(DataError, match=r"has no images in train/ \(4 images in all\), but in test/; it must"):
        task.check()
    task.needed_splits = (Split.test,)
    task.check()
    with pytest.raises(DataError, match="has 2 of 3 classes, and the model has no names of classes"):
        task.open_data("test", 0)
    task.use_classes(["c2", "c1", "c0"])
    assert task.open_data("test", 0).fetch(np.arange(4), 0)[1].tolist() == [2, 2, 0, 0]
    task.use_classes(["c0", "c1", "d"])
    with pytest.raises(DataError, match="the model does not know the classes c2; it knows c0, c1, d"):
        task.open_data("test", 0)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a run; predictions do without it."""
    root, real = tree(tmp_path / "t"), os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("c1"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="recipe.data.root=.*train/c1 cannot be listed: Permission denied"):
        recipe(root).check()
    names, rows = recipe(root).open_inputs(root)
    assert len(names) == 6 and rows.left_out["val/c1/"] == "it cannot be listed: Permission denied"


def test_an_empty_name_or_folder_is_no_trap(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "a.jpg" / "b")
    found = list_folder(tmp_path, Judgements(tmp_path, None))
    assert not found.names and found.left_out == {"a.jpg/": "a folder without files"}
    assert decode_image(encode(picture(1, 900), "PNG"), 16).shape == (16, 16, 3)
