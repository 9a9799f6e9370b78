"""Image files of any size: what is decoded is what the whole picture shows, and every pixel is a function of (seed,
epoch, id) alone.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from dtf.core.errors import ConfigError, DataError
from dtf.core.seeding import draws
from dtf.data.decode_any import decode_any
from dtf.recipes.resnet import augment, jpeg
from dtf.recipes.resnet.crops import CROP_DRAWS, Part, random_part, shorter_side
from dtf.recipes.resnet.options import ModelOptions
from dtf.recipes.resnet.photo_recipe import BadRecords, PhotoOptions, Policy, ResnetPhotos
from dtf.recipes.resnet.photos import Photos, resized
from dtf.recipes.resnet.store import _MOST, _MOST_AT_ONCE, Store
from tests.support.image_files import encode, picture, tree

EVERYTHING: dict[str, Any] = {
    "jitter": [0.4, 0.4, 0.4, 0.1],
    "policy": Policy.trivial,
    "mixup": 0.2,
    "cutmix": 1.0,
    "grow_from": 16,
    "grow_epochs": 2,
}


def recipe(root: Path, **data: Any) -> ResnetPhotos:
    values: dict[str, Any] = {"pixels": 32, "threads": 1} | data
    options = PhotoOptions(root=str(root), cache=str(root.parent / "cache"), **values)
    return ResnetPhotos(model=ModelOptions(classes=2), data=options)


def digest(inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> list[int]:
    """One number per row, of everything about it."""
    parts = [*(inputs[key].numpy() for key in sorted(inputs)), targets.numpy()]
    return [zlib.crc32(b"".join(part[i].tobytes() for part in parts)) for i in range(len(targets))]


def test_resampling_is_torchvisions() -> None:
    image = picture(301, 250)
    ours = resized(image, 64, 64)[0]
    reference = v2.functional.resize(torch.from_numpy(image).permute(2, 0, 1), [64, 64], antialias=True)
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("size", [0, _MOST_AT_ONCE - 2, _MOST_AT_ONCE, 2 * _MOST_AT_ONCE + 5])
def test_files_of_any_size_are_read_whole(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(size)
    for end in (b"", b"\xff\xd9"):  # that of a JPEG file
        (tmp_path / "file").write_bytes(content + end)
        assert Store(tmp_path, ("file",), None, "")[0] == content + end


def test_enormous_files_are_named_before_there_is_memory_for_them(tmp_path: Path) -> None:
    for size in (_MOST + 1, 1 << 40):
        with open(tmp_path / "file", "wb") as file:
            file.truncate(size)
        with pytest.raises(OSError, match=f"a file of {size} bytes, more than {_MOST}"):
            Store(tmp_path, ("file",), None, "")[0]


@pytest.mark.parametrize("sides", [(40, 50), (90, 120), (64, 64)])
def test_a_mirror_image_is_that_of_the_resampled_picture(sides: tuple[int, int]) -> None:
    """Wherever it is turned, and with or without a place for it."""
    around = np.random.default_rng(0).integers(0, 256, (sides[0] + 9, sides[1] + 12, 3), dtype=np.uint8)
    picture = around[5 : 5 + sides[0], 7 : 7 + sides[1]]
    place = torch.empty(1, 64, 64, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    plain, found = resized(picture.copy(), 64, 64), resized(picture, 64, 64, place, mirrored=True)
    assert torch.equal(found, plain.flip(3)) and found.data_ptr() == place.data_ptr()
    own = resized(picture, 64, 64, mirrored=True)
    assert torch.equal(own, found) and own.is_contiguous(memory_format=torch.channels_last)
    before = around.copy()
    for mirrored in (False, True):  # where the picture lies the next one is decoded
        resized(picture, 64, 64, mirrored=mirrored).zero_()
    assert np.array_equal(around, before)


@pytest.mark.parametrize("sides", [(300, 200), (200, 301), (97, 97), (347, 500), (701, 1103), (1999, 1501)])
def test_evaluation_sees_what_torchvision_shows(tmp_path: Path, sides: tuple[int, int]) -> None:
    """Also where the file is decoded at a fraction of its size, in which its sides are no whole pixels."""
    root = tree(tmp_path / "t", train=1, val=1)
    content = encode(picture(*sides, detail=16))
    for file in root.glob("val/*/*.jpg"):
        file.write_bytes(content)
    data = recipe(root, pixels=64, whole=73).open_data("eval", 0)
    inputs, targets = data.fetch(np.arange(2), 0)
    image = torch.from_numpy(simplejpeg.decode_jpeg(content)).permute(2, 0, 1)
    reference = functional.center_crop(functional.resize(image, [73], antialias=True), [64, 64])
    apart = (inputs["pixels"][0].permute(2, 0, 1).int() - reference.int()).abs().float()
    scaled = jpeg.reduction(Part(0, 0, *sides), 2 * 73) > 1
    assert (apart.mean() <= 2 and apart.max() <= 16) if scaled else apart.max() == 0
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_picture_whose_rows_are_lost_is_named(split: str, tmp_path: Path) -> None:
    """Pillow shows them grey, since the file has an end."""
    root = tree(tmp_path / "t", train=1, val=1)
    content = bytearray(encode(picture(701, 1103, detail=16)))
    content[len(content) // 2 :] = b"\xff\xd9"
    for file in root.glob("*/*/*.jpg"):
        file.write_bytes(content)
    data = recipe(root, pixels=64, whole=73, crop_area=[0.9, 1.0]).open_data(split, 0)
    with pytest.raises(DataError, match="0.jpg cannot be used: a part of it is lost: .*premature end of data"):
        data.fetch(np.arange(1), 0)


def test_random_parts_follow_their_ranges() -> None:
    uniform = draws(0, 0, np.arange(1000), CROP_DRAWS)
    parts = [random_part(300, 400, (0.1, 0.9), (0.5, 2.0), row) for row in uniform]
    assert all(0 <= p.top <= 300 - p.height and 0 <= p.left <= 400 - p.width for p in parts)
    areas = np.array([p.height * p.width / (300 * 400) for p in parts])
    ratios = np.array([p.width / p.height for p in parts])
    assert areas.min() >= 0.09 and areas.max() <= 0.91 and ratios.min() >= 0.49 and ratios.max() <= 2.05
    tried = v2.RandomResizedCrop(8, (0.1, 0.9), (0.5, 2.0))
    torch.manual_seed(0)
    blank = torch.zeros(3, 300, 400)
    theirs = [tried.make_params([blank]) for _ in range(500)]
    assert abs(areas.mean() - np.mean([p["height"] * p["width"] / 120_000 for p in theirs])) < 0.04


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1)])
def test_where_no_part_fits_the_largest_central_one_is_taken(height: int, width: int) -> None:
    part = random_part(height, width, (0.9, 1.0), (3 / 4, 4 / 3), np.full(CROP_DRAWS, 0.999))
    assert 0 < part.height <= height and 0 < part.width <= width
    assert abs(2 * part.top + part.height - height) <= 1 and abs(2 * part.left + part.width - width) <= 1
    assert shorter_side(10, 1000, 8) == (8, 800)


# ---------------------------------------------------------------- odd files


def odd_files() -> dict[str, bytes]:
    image = picture(60, 90)
    turned = encode(image, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    deep = (picture(60, 90)[..., 0].astype(np.uint16) << 8) + 7
    return {
        "cmyk": encode(image, mode="CMYK"),
        "grey": encode(image, mode="L"),
        "png": encode(image, "PNG"),
        "palette": encode(image, "PNG", mode="P"),
        "alpha": encode(image, "PNG", mode="RGBA"),
        "turned": turned,
        "deep": encode(deep, "PNG", mode="I;16"),
        "trailing": encode(image) + b"\0\0 more",
    }


@pytest.mark.parametrize("kind", odd_files())
def test_odd_files_are_converted(kind: str, tmp_path: Path) -> None:
    content = odd_files()[kind]
    found = decode_any(content)
    assert found.dtype == np.uint8 and found.shape == ((90, 60, 3) if kind == "turned" else (60, 90, 3))
    expected = picture(60, 90)
    if kind in ("grey", "deep"):
        weights = [1.0, 0, 0] if kind == "deep" else [0.299, 0.587, 0.114]
        expected = np.repeat((expected @ weights)[..., None], 3, axis=2)
    if kind == "turned":
        expected = np.rot90(expected, 3)
    assert np.abs(found.astype(float) - expected).mean() < (20 if kind == "palette" else 4)
    root = tree(tmp_path / "t")
    (root / "train/c0/0.jpg").write_bytes(content)
    inputs, _ = recipe(root).open_data("train", 0).fetch(np.array([0]), 0)
    assert inputs["pixels"].float().std() > 5


def bad_files() -> dict[str, tuple[bytes, str]]:
    image = encode(picture(60, 90))
    bomb = bytearray(image)
    at = jpeg.read_header(image).height_at  # type: ignore[union-attr]
    bomb[at : at + 4] = b"\xff\xff\xff\xff"
    return {
        "empty": (b"", "it is empty"),
        "cut off": (image[: len(image) // 2], "a part of it is lost"),
        "text": (b"no image at all", "15 bytes that are no image"),
        "bomb": (bytes(bomb), "pixels"),
    }


@pytest.mark.parametrize("kind", bad_files())
def test_files_that_cannot_be_decoded_are_named(kind: str, tmp_path: Path) -> None:
    content, words = bad_files()[kind]
    root = tree(tmp_path / "t")
    (root / "train/c1/2.jpg").write_bytes(content)
    with pytest.raises(DataError, match=f"train/c1/2.jpg cannot be used: .*{words}.*recipe.data.bad_records=skip"):
        recipe(root).open_data("train", 0).fetch(np.arange(8), 0)
    data = recipe(root, bad_records=BadRecords["skip"], bad_share=0.2).open_data("train", 0)
    inputs, _ = data.fetch(np.arange(8), 0)
    assert list(data.bad) == [6] and data.allowed == 2 and words.split()[0] in data.bad[6]
    assert not inputs["pixels"][6].any() and all(inputs["pixels"][i].any() for i in range(8) if i != 6)


# ---------------------------------------------------------------- augmentation


def test_jitter_follows_torchvision() -> None:
    """All orders, each change by its own draw."""
    image = torch.from_numpy(picture(20, 20)).permute(2, 0, 1)
    seen = {
        augment.jitter(image, [0.4, 0.4, 0.4, 0.2], np.array([0.9, 0.1, 0.8, 0.3, (k + 0.5) / 24])).sum().item()
        for k in range(24)
    }
    assert len(seen) >= 12
    one = augment.jitter(image, [0.4, 0, 0, 0], np.array([0.75, 0.5, 0.5, 0.5, 0.0]))
    assert torch.equal(one, functional.adjust_brightness(image, 1.2))
    assert torch.equal(augment.jitter(image, [0, 0, 0, 0], np.full(5, 0.9)), image)


@pytest.mark.parametrize("policy", ["trivial", "rand"])
def test_policies_reach_every_operation(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, operate = set(), augment._operate
    monkeypatch.setattr(
        augment,
        "_operate",
        lambda image, name, *rest, **wide: (reached.add(name), operate(image, name, *rest, **wide))[1],
    )
    image = torch.from_numpy(picture(32, 32)).permute(2, 0, 1)
    found = [augment.apply_policy(image, policy, row) for row in draws(0, 0, np.arange(150), augment.POLICY_DRAWS)]
    assert all(one.shape == image.shape and one.dtype is torch.uint8 for one in found)
    assert len({one.numpy().tobytes() for one in found}) > 30
    assert reached == {*augment._OPERATIONS}
    assert 0 < sum(torch.equal(one, image) for one in found) < 30, (
        "only the identity, and an operation without strength, leave an image as it is"
    )


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 4.0])
def test_shares_follow_their_distribution(alpha: float) -> None:
    table = augment._quantiles(alpha)
    shares = np.interp(np.random.default_rng(0).random(200_000), np.linspace(0, 1, len(table)), table)
    sample = np.random.default_rng(1).beta(alpha, alpha, 200_000)
    assert abs(shares.mean() - 0.5) < 0.005 and abs(shares.std() - sample.std()) < 0.01
    assert np.abs(np.quantile(shares, [0.1, 0.4, 0.7]) - np.quantile(sample, [0.1, 0.4, 0.7])).max() < 0.02


@pytest.mark.parametrize("count", [1, 5, 8])
def test_mixing_is_with_the_neighbour_by_the_share_in_the_targets(count: int) -> None:
    images = torch.rand(count, 3, 20, 24, dtype=torch.float64)
    flat = torch.arange(count, dtype=torch.float64)[:, None, None, None].expand_as(images)
    labels = np.arange(count)
    uniform = draws(0, 0, labels, augment.MIX_DRAWS)
    for mixup, cutmix in ((0.4, 0.0), (0.0, 1.0), (0.4, 1.0)):
        how, targets = augment.Mix(mixup, cutmix).draw(uniform, labels, 20, 24)
        mixed = augment.mix(flat, how)
        for i in range(count):
            partner = i ^ 1 if i ^ 1 < count else i
            own, other, share = targets[i].tolist()
            assert (own, other) == (i, partner)
            assert mixed[i].mean().item() == pytest.approx(share * i + (1 - share) * partner, abs=1e-5)
    assert torch.equal(augment.mix(images[:1], how[:1]), images[:1])


def test_the_loss_of_a_mixed_row_is_mixed(tmp_path: Path) -> None:
    task = recipe(tree(tmp_path / "t"))
    scores = torch.randn(3, 2, dtype=torch.float64)
    targets = torch.tensor([[0, 1, 0.25], [1, 1, 1.0], [1, 0, 0.5]], dtype=torch.float64)
    plain = [task.loss(scores, targets[:, k].long()) for k in (0, 1)]
    assert torch.allclose(task.loss(scores, targets), targets[:, 2] * plain[0] + (1 - targets[:, 2]) * plain[1])


def test_half_of_the_images_are_mirrored(tmp_path: Path) -> None:
    root, ids = tree(tmp_path / "t"), np.arange(8)
    plain = recipe(root, flip=False).open_data("train", 0).fetch(ids, 0)[0]["pixels"]
    seen = recipe(root).open_data("train", 0).fetch(ids, 0)[0]["pixels"]
    mirrored = draws(0, 0, ids, CROP_DRAWS + 1)[:, CROP_DRAWS] < 0.5
    assert 0 < mirrored.sum() < 8
    assert torch.equal(seen[mirrored], plain[mirrored].flip(2)) and torch.equal(seen[~mirrored], plain[~mirrored])


class Touched(TorchDispatchMode):
    """The most numbers that an operation has written."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and "empty" not in str(func):
            self.most = max(self.most, result.numel())
        return result


def test_on_the_device_bytes_become_numbers(tmp_path: Path) -> None:
    """On a processor in one pass over memory: each operation writes what is in the cache, never the whole batch."""
    task = recipe(tree(tmp_path / "t"))
    inputs, _ = task.open_data("train", 0).fetch(np.arange(8), 0)
    task.receive(inputs)  # makes the constants
    with Touched() as touched:
        found = task.receive(inputs)
    expected = (
        inputs["pixels"].permute(0, 3, 1, 2) / 255 - torch.tensor(task.data.mean)[:, None, None]
    ) / torch.tensor(task.data.std)[:, None, None]
    assert torch.allclose(found, expected, atol=1e-5) and found.dtype is torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    together = torch.get_num_threads()
    assert together >= 8 or touched.most == together * found[0].numel()
    assert task.receive({"pixels": inputs["pixels"][:0]}).shape == (0, 3, 32, 32)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"crop_area": [0.5]}, "recipe.data.crop_area=[0.5] must be 2 numbers"),
        ({"crop_ratio": [2.0, 1.0]}, "recipe.data.crop_ratio=[2.0, 1.0] must not fall"),
        ({"jitter": [0.1, 0.1]}, "recipe.data.jitter=[0.1, 0.1] must be 4 numbers"),
        ({"jitter": [0.1, 0.1, 0.1, 0.9]}, "the hue turns by at most 0.5"),
        ({"whole": 20}, "recipe.data.whole=20 must be at least recipe.data.pixels=32"),
        ({"grow_from": 16}, "recipe.data.grow_from=16 and recipe.data.grow_epochs=0 belong together"),
        ({"grow_from": 64, "grow_epochs": 2}, "recipe.data.grow_from=64 must be 16 to recipe.data.pixels=32"),
        ({"train_rows": 100}, "recipe.data.train_rows=100, but train/ has 8 images"),
    ],
)
def test_options_that_make_no_data_are_refused(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(tree(tmp_path / "t"), **data).check()
    assert words in str(caught.value)


def test_the_classes_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe.model.classes=2, but .* has 3 classes; set recipe.model.classes=3"):
        recipe(tree(tmp_path / "t", classes=3)).check()


def test_photos_say_what_they_need(tmp_path: Path) -> None:
    mixing = recipe(tree(tmp_path / "t"), mixup=0.2)
    mixed = mixing.open_data("train", 0)
    assert isinstance(mixed, Photos) and mixed.repeats and mixed.groups().tolist() == [0] * 4 + [1] * 4
    assert mixing.pairs and not recipe(tmp_path / "t").pairs


def test_training_rows_without_augmentation_are_those_of_an_evaluation(tmp_path: Path) -> None:
    """However training looks at them: the pixels that the same file has in val/, and plain classes."""
    root = tree(tmp_path / "t")
    shutil.copytree(root / "train", root / "val", dirs_exist_ok=True)
    options = recipe(root, **EVERYTHING)
    train = options.open_data("train", 0)
    seen, labels = train.unaugmented().fetch(np.arange(8), 0)
    expected, plain = options.open_data("eval", 0).fetch(np.arange(8), 0)
    assert (
        seen.keys() == expected.keys()
        and all(torch.equal(seen[key], expected[key]) for key in expected)
        and torch.equal(labels, plain)
    )
    assert "mix" in train.fetch(np.arange(8), 0)[0], "what training sees is left alone"
