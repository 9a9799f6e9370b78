"""Images in memory: the same pixels for a row whatever else is asked for; drawn shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dtf.core.seeding import draws
from dtf.recipes.resnet import shapes
from dtf.recipes.resnet.images import Images, augment, thin


def small(**options: object) -> Images:
    random = np.random.default_rng(1)
    return Images(
        random.integers(0, 255, (50, 16, 16, 3), np.uint8),
        np.arange(50) % 5,
        (0.5, 0.4, 0.3),
        (0.2, 0.3, 0.1),
        **options,  # type: ignore[arg-type]
    )


def test_further_views_of_a_row_differ_in_augmentation_only() -> None:
    data, rows = small(crop_pad=3, flip=True, seed=7), np.arange(50)
    (first, labels), (second, again) = data.fetch(rows, epoch=0), data.fetch(rows + 50, epoch=0)
    assert torch.equal(labels, again) and (first != second).any(dim=(1, 2, 3)).float().mean() > 0.9
    assert torch.equal(data.unaugmented().fetch(rows + 50, 0)[0], data.unaugmented().fetch(rows, 0)[0])
    assert data.groups().tolist() == labels.tolist()
    drawn = shapes.Shapes(6, 8, 3, 0, "train", crop_pad=0, flip=False, augment_seed=0)
    assert torch.equal(drawn.fetch(np.array([9, 3]), 0)[0][0], drawn.fetch(np.array([3]), 0)[0][0])


def test_a_row_has_the_same_pixels_whatever_batch_it_is_in() -> None:
    data = small(crop_pad=3, flip=True, seed=7)
    whole, targets = data.fetch(np.arange(50), epoch=2)
    order = np.random.default_rng(2).permutation(50)
    for ids in (order[:1], order[5:12], order):
        inputs, labels = small(crop_pad=3, flip=True, seed=7).fetch(ids, epoch=2)
        assert inputs.equal(whole[ids]) and labels.equal(targets[ids])


def test_seed_and_epoch_change_the_augmentation_and_evaluation_has_none() -> None:
    ids = np.arange(50)
    first = small(crop_pad=3, flip=True, seed=7).fetch(ids, 0)[0]
    assert not first.equal(small(crop_pad=3, flip=True, seed=7).fetch(ids, 1)[0])
    assert not first.equal(small(crop_pad=3, flip=True, seed=8).fetch(ids, 0)[0])
    assert small(seed=7).fetch(ids, 0)[0].equal(small(seed=8).fetch(ids, 1)[0])


def test_inputs_are_normalised_floats_in_channels_last_order() -> None:
    data = small()
    inputs, targets = data.fetch(np.array([3, 4]), 0)
    assert inputs.shape == (2, 3, 16, 16) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    pixels = torch.from_numpy(data._pixels[[3, 4]]).permute(0, 3, 1, 2)
    expected = (pixels / 255 - torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)) / torch.tensor([0.2, 0.3, 0.1]).view(
        1, 3, 1, 1
    )
    torch.testing.assert_close(inputs, expected)


def test_augmentation_is_a_window_of_the_padded_image_mirrored_half_of_the_time() -> None:
    pixels = np.random.default_rng(0).integers(1, 255, (400, 6, 6, 3), np.uint8)
    uniform = draws(0, 0, np.arange(400), 3)
    out = augment(pixels, uniform, crop_pad=2, flip=True)
    padded = np.pad(pixels, ((0, 0), (2, 2), (2, 2), (0, 0)))
    seen = set()
    for row in range(400):
        windows = {
            (top, left, mirror): padded[row, top : top + 6, left : left + 6][:, :: -1 if mirror else 1]
            for top in range(5)
            for left in range(5)
            for mirror in (0, 1)
        }
        seen |= {key for key, window in windows.items() if (window == out[row]).all()}
    assert len(seen) == 50  # every window occurs
    mirrored = augment(pixels, uniform, crop_pad=0, flip=True)
    assert 160 < sum((mirrored[row] != pixels[row]).any() for row in range(400)) < 240


def test_the_fingerprint_differs_when_a_pixel_or_a_label_does() -> None:
    pixels, labels = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)
    one = Images(pixels, labels, (0, 0, 0), (1, 1, 1)).fingerprint()
    assert one == Images(pixels.copy(), labels, (0.1, 0, 0), (1, 1, 1)).fingerprint()
    changed = pixels.copy()
    changed[2, 3, 4, 1] = 1
    assert (
        len(
            {
                one,
                Images(changed, labels, (0, 0, 0), (1, 1, 1)).fingerprint(),
                Images(pixels, labels[::-1], (0, 0, 0), (1, 1, 1)).fingerprint(),
            }
        )
        == 3
    )


def test_thinning_keeps_classes_in_balance() -> None:
    labels = np.repeat(np.arange(10), 500)
    assert np.bincount(labels[thin(5000, 100)]).tolist() == [10] * 10
    assert thin(7, 7).tolist() == list(range(7))


# ---------------------------------------------------------------- drawn shapes


def test_shapes_are_a_function_of_seed_split_and_id() -> None:
    images, labels = shapes.draw(np.arange(600), 24, 8, 0, "train")
    some = np.array([599, 0, 300, 17])
    again, same = shapes.draw(some, 24, 8, 0, "train")
    assert (again == images[some]).all() and (same == labels[some]).all()
    for seed, split in ((1, "train"), (0, "eval")):
        assert (shapes.draw(some, 24, 8, seed, split)[0] != again).mean() > 0.9


@pytest.mark.parametrize("classes", [2, 5, 8])
def test_shapes_are_balanced(classes: int) -> None:
    counts = np.bincount(shapes.draw(np.arange(400), 8, classes, 0, "train")[1], minlength=classes)
    assert counts.max() - counts.min() <= 1


def test_kinds_of_shapes_differ_and_cover_a_fair_part_of_the_image() -> None:
    v, u = np.mgrid[-1:1:64j, -1:1:64j]
    masks = [shapes._depth(kind, u, v) > 0 for kind in shapes.KINDS]
    assert all(0.1 < mask.mean() < 0.7 and not (mask & (np.hypot(u, v) > 1.05)).any() for mask in masks)
    assert all((one != other).mean() > 0.05 for row, one in enumerate(masks) for other in masks[:row])


def test_shapes_are_normalised_by_their_own_mean_and_spread() -> None:
    pixels = shapes.draw(np.arange(800), 24, 8, 0, "train")[0] / 255
    assert pixels.mean() == pytest.approx(shapes.MEAN[0], abs=0.02) and pixels.std() == pytest.approx(
        shapes.STD[0], abs=0.02
    )


# ---------------------------------------------------------------- trees
