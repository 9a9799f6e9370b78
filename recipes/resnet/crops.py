"""Geometry of crops: which part of a picture is used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

TRIES = 10
CROP_DRAWS = 2 * TRIES + 2
"""Uniform draws that `random_part` takes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [top, top + height) and columns [left, left + width) of a picture."""

    top: int
    left: int
    height: int
    width: int


def random_part(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], uniform: np.ndarray
) -> Part:
    """A part with a random share of the area and a random ratio of width to height; the largest central one when ten
    tries do not fit.

    `uniform`: draws in [0, 1), (CROP_DRAWS,). Source: Szegedy et al. 2015 (arXiv:1409.4842), section 6, as
    torchvision's RandomResizedCrop.
    """
    draws = uniform.tolist()
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for k in range(TRIES):
        size = height * width * (area[0] + (area[1] - area[0]) * draws[2 * k])
        shape = math.exp(low + (high - low) * draws[2 * k + 1])
        w, h = round(math.sqrt(size * shape)), round(math.sqrt(size / shape))
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w, h = width, height
        if width < ratio[0] * height:
            h = max(1, round(width / ratio[0]))
        elif width > ratio[1] * height:
            w = max(1, round(height * ratio[1]))
        return Part((height - h) // 2, (width - w) // 2, h, w)
    return Part(int(draws[-2] * (height - h + 1)), int(draws[-1] * (width - w + 1)), h, w)


def shorter_side(height: int, width: int, pixels: int) -> tuple[int, int]:
    """The size of a picture whose shorter side is made `pixels` long, as torchvision's Resize."""
    if height <= width:
        return pixels, int(pixels * width / height)
    return int(pixels * height / width), pixels
