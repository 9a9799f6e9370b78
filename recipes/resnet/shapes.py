"""Drawing of labelled images: one filled shape each, of random place, size, rotation and colour, before a striped and
noisy background.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtf.core.seeding import draws, seed_of
from dtf.recipes.resnet.images import Images

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("disc", "ring", "square", "triangle", "plus", "star", "crescent", "bar")
"""Label -> shape."""

MEAN, STD = (0.5, 0.5, 0.5), (0.29, 0.29, 0.29)
"""Of the drawn pixels, all channels; colours are symmetric about one half."""

_CHUNK = 256  # rows drawn at once, so that the temporaries stay in cache


class Shapes(Images):
    """Rows drawn when they are first read, and kept: a rank draws only what it reads, and the first step need not wait
    for the rest.
    """

    def __init__(
        self,
        rows: int,
        pixels: int,
        classes: int,
        seed: int,
        split: str,
        *,
        crop_pad: int,
        flip: bool,
        augment_seed: int,
    ) -> None:
        empty = np.empty((rows, pixels, pixels, 3), np.uint8)
        digest = f"drawn from {seed}/{split}"
        super().__init__(
            empty, np.arange(rows) % classes, MEAN, STD, crop_pad=crop_pad, flip=flip, seed=augment_seed, digest=digest
        )
        self._drawn = np.zeros(rows, bool)
        self._draw = lambda ids: draw(ids, pixels, classes, seed, split)[0]

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        rows = ids % len(self)
        missing = rows[~self._drawn[rows]]
        if len(missing):
            self._pixels[missing] = self._draw(missing)
            self._drawn[missing] = True
        return super().fetch(ids, epoch)


def draw(ids: np.ndarray, pixels: int, classes: int, seed: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, pixels, pixels, 3) uint8 and labels (N,) int64 of the rows `ids`: a pure function of (seed, split, id)
    and the sizes.

    Row i shows shape i mod `classes`, so that classes are balanced.
    """
    images = np.empty((len(ids), pixels, pixels, 3), np.uint8)
    labels = ids % classes
    key = seed_of(seed, "shapes", split)
    for start in range(0, len(ids), _CHUNK):
        rows = slice(start, start + _CHUNK)
        images[rows] = _draw(ids[rows], labels[rows], pixels, key)
    return images, labels


def _draw(ids: np.ndarray, labels: np.ndarray, pixels: int, key: int) -> np.ndarray:
    random = draws(key, 0, ids, 16).astype(np.float32)[:, :, None, None]  # (n, 16, 1, 1)
    noise = draws(key, 1, ids, pixels * pixels).astype(np.float32).reshape(-1, pixels, pixels)
    y, x = np.mgrid[-1 : 1 : pixels * 1j, -1 : 1 : pixels * 1j].astype(np.float32)

    radius = 0.45 + 0.3 * random[:, 0]  # of the image's half side
    room = 0.9 - radius
    angle = 2 * np.pi * random[:, 1]
    cos, sin = np.cos(angle) / radius, np.sin(angle) / radius
    dx, dy = x - room * (2 * random[:, 2] - 1), y - room * (2 * random[:, 3] - 1)
    u, v = cos * dx + sin * dy, cos * dy - sin * dx  # the shape's own axes; it fills the unit disc

    inside = np.empty_like(u)
    for label in np.unique(labels):
        of_label = labels == label
        inside[of_label] = _depth(KINDS[label], u[of_label], v[of_label])
    edge = pixels / 2 * radius  # pixels per unit of the shape's axes
    cover = np.clip(inside * edge + 0.5, 0, 1)[..., None]  # anti-aliased over one pixel

    paper = random[:, 4:7, 0, 0][:, None, None, :]  # (n, 1, 1, 3)
    ink = np.mod(paper + 0.35 + 0.3 * random[:, 7:10, 0, 0][:, None, None, :], 1)  # at least 0.35 away in each channel
    waves = np.sin(
        2
        * np.pi
        * (
            (1 + 3 * random[:, 10]) * (np.cos(np.pi * random[:, 11]) * x + np.sin(np.pi * random[:, 11]) * y)
            + random[:, 12]
        )
    )
    texture = 0.15 * random[:, 13] * waves + 0.2 * (noise - 0.5)
    image = paper + cover * (ink - paper) + texture[..., None]
    return np.clip(image * 255, 0, 255).astype(np.uint8)


def _depth(kind: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """How deep (u, v) lies inside the shape, negative outside, about in units of length near the edge."""
    match kind:
        case "disc":
            return 0.9 - np.hypot(u, v)
        case "ring":
            return 0.22 - np.abs(np.hypot(u, v) - 0.72)
        case "square":
            return 0.72 - np.maximum(np.abs(u), np.abs(v))
        case "triangle":
            return 0.5 - np.maximum(np.maximum(np.sqrt(3) / 2 * u - v / 2, -np.sqrt(3) / 2 * u - v / 2), v)
        case "plus":
            long, short = np.maximum(np.abs(u), np.abs(v)), np.minimum(np.abs(u), np.abs(v))
            return np.minimum(0.95 - long, 0.28 - short)
        case "star":
            turn, inner = 2 * np.pi / 5, 0.45  # between two tips; radius of the notches
            # from the nearest tip: one edge, from tip to notch, is left
            angle = np.abs(np.mod(np.arctan2(v, u), turn) - turn / 2)
            radius = np.hypot(u, v)
            run, rise = 1 - inner * np.cos(turn / 2), inner * np.sin(turn / 2)
            return (rise * (1 - radius * np.cos(angle)) - run * radius * np.sin(angle)) / np.hypot(run, rise)
        case "crescent":
            return np.minimum(0.95 - np.hypot(u, v), np.hypot(u - 0.5, v) - 0.7)
        case "bar":
            return np.minimum(0.98 - np.abs(u), 0.25 - np.abs(v))
    raise ValueError(f"unknown shape {kind}")
