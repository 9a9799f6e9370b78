"""Changes of colour and shape of one training image, and mixing of pairs: torchvision's operations, chosen by draws
that are given. Draws nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

JITTER_DRAWS = 5
POLICY_DRAWS = 6
MIX_DRAWS = 4


# Operation -> (largest strength under `trivial`, under `rand`); translations in pixels (`rand`: share of the side),
# rotations in degrees.
_SIGNED = {
    "shear_x": (0.99, 0.3),
    "shear_y": (0.99, 0.3),
    "translate_x": (32.0, 150 / 331),
    "translate_y": (32.0, 150 / 331),
    "rotate": (135.0, 30.0),
    "brightness": (0.99, 0.9),
    "saturation": (0.99, 0.9),
    "contrast": (0.99, 0.9),
    "sharpness": (0.99, 0.9),
}
_UNSIGNED = ("identity", "posterize", "solarize", "autocontrast", "equalize")
_OPERATIONS = (*_SIGNED, *_UNSIGNED)
_LEVELS = 31
_RAND_LEVEL, _RAND_TIMES = 9, 2


def jitter(image: Tensor, strengths: Sequence[float], uniform: np.ndarray) -> Tensor:
    """Brightness, contrast, saturation and hue of (3, H, W) bytes changed at random, in a random order.

    `strengths`: of the four; a factor in [1 - s, 1 + s], a turn of the hue in [-s, s]. `uniform`: (JITTER_DRAWS,). As
    torchvision's ColorJitter.
    """
    *turns, order = uniform.tolist()
    changes = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    ]
    left = list(range(4))
    number = int(order * 24)
    for rest in (4, 3, 2, 1):
        number, place = divmod(number, rest)
        k = left.pop(place)
        if strengths[k]:
            turn = strengths[k] * (2 * turns[k] - 1)
            image = changes[k](image, turn if k == 3 else max(0.0, 1 + turn))
    return image


def apply_policy(image: Tensor, policy: str, uniform: np.ndarray) -> Tensor:
    """(3, H, W) bytes after one operation of any strength (`trivial`) or two of a fixed one (`rand`). `uniform`:
    (POLICY_DRAWS,).

    Sources: Müller & Hutter 2021 (arXiv:2103.10158), the wide space; Cubuk et al. 2020 (arXiv:1909.13719), 2 operations
    at 9 of 30.
    """
    draws = uniform.tolist()
    if policy == "trivial":
        return _operate(
            image, _OPERATIONS[int(draws[0] * len(_OPERATIONS))], int(draws[1] * _LEVELS), draws[2] < 0.5, wide=True
        )
    for k in range(_RAND_TIMES):
        image = _operate(
            image, _OPERATIONS[int(draws[3 * k] * len(_OPERATIONS))], _RAND_LEVEL, draws[3 * k + 1] < 0.5, wide=False
        )
    return image


def _operate(image: Tensor, name: str, level: int, negative: bool, wide: bool) -> Tensor:
    share = level / (_LEVELS - 1)
    match name:
        case "identity":
            return image
        case "posterize":
            return functional.posterize(image, 8 - round(share * (6 if wide else 4)))
        case "solarize":
            return functional.solarize(image, 255 * (1 - share))
        case "autocontrast":
            return functional.autocontrast(image)
        case "equalize":
            return functional.equalize(image)
    strength = share * _SIGNED[name][0 if wide else 1] * (-1 if negative else 1)
    match name:
        case "brightness":
            return functional.adjust_brightness(image, 1 + strength)
        case "saturation":
            return functional.adjust_saturation(image, 1 + strength)
        case "contrast":
            return functional.adjust_contrast(image, 1 + strength)
        case "sharpness":
            return functional.adjust_sharpness(image, 1 + strength)
    angle, move, shear = 0.0, [0.0, 0.0], [0.0, 0.0]
    axis = int(name.endswith("y"))
    if name == "rotate":
        angle = strength
    elif name.startswith("translate"):
        move[axis] = float(int(strength if wide else strength * image.shape[2 - axis]))
    else:
        shear[axis] = float(np.degrees(np.arctan(strength)))
    return functional.affine(
        image, angle=angle, translate=move, scale=1.0, shear=shear, interpolation=InterpolationMode.NEAREST
    )


class Mix:
    """How rows are mixed with the row beside them: rows 2k and 2k + 1 of a global batch are a pair; a last odd row
    stays as it is.

    `mixup`, `cutmix`: alpha of the Beta(alpha, alpha) of a row's own share, 0: not; with both, each row has one of the
    two. Sources: Zhang et al. 2018 (arXiv:1710.09412); Yun et al. 2019 (arXiv:1905.04899).
    """

    def __init__(self, mixup: float, cutmix: float) -> None:
        self._tables = [_quantiles(alpha) if alpha else None for alpha in (mixup, cutmix)]

    def draw(self, uniform: np.ndarray, labels: np.ndarray, height: int, width: int) -> tuple[Tensor, Tensor]:
        """What `mix` needs, (B, 5) float32: share of the row itself outside of the box [top, bottom) x [left, right), 0
        within; and targets (B, 3).

        `uniform`: (B, MIX_DRAWS). Targets: the row's class, its partner's, share of the row.
        """
        count = len(labels)
        partner = np.arange(count) ^ 1
        partner[partner == count] = count - 1
        both = all(table is not None for table in self._tables)
        cut = uniform[:, 1] < 0.5 if both else np.full(count, self._tables[0] is None)
        shares = [
            np.interp(uniform[:, 0], np.linspace(0, 1, len(table)), table) if table is not None else np.ones(count)
            for table in self._tables
        ]
        share = np.where(cut, shares[1], shares[0])
        side = np.sqrt(1 - share)[:, None] * [height, width]
        centre = uniform[:, 2:4] * [height, width]
        low, high = (np.clip(np.floor(centre + sign * side / 2), 0, [height, width]) for sign in (-1, 1))
        inside = (high - low).prod(axis=1) / (height * width)
        low, high = (np.where(cut[:, None], edge, 0) for edge in (low, high))
        weight = np.where(cut, 1.0, share)
        effective = np.where(partner == np.arange(count), 1.0, np.where(cut, 1 - inside, share))
        mixing = np.column_stack([weight, low[:, 0], high[:, 0], low[:, 1], high[:, 1]])
        targets = np.column_stack([labels, labels[partner], effective])
        return torch.from_numpy(mixing.astype(np.float32)), torch.from_numpy(targets.astype(np.float32))


def mix(images: Tensor, mixing: Tensor) -> Tensor:
    """(B, C, H, W) floats, each mixed with the one beside it as `Mix.draw` says; on the device, without waiting for
    it.
    """
    pairs = images[: len(images) // 2 * 2]
    partners = torch.cat([pairs.unflatten(0, (-1, 2)).flip(1).flatten(0, 1), images[len(pairs) :]])
    weight, top, bottom, left, right = (column[:, None, None, None] for column in mixing.unbind(1))
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return torch.lerp(partners, images, torch.where(inside, 0.0, weight).to(images.dtype))


def _quantiles(alpha: float, count: int = 4097) -> np.ndarray:
    """Quantiles of Beta(alpha, alpha) at `count` levels from 0 to 1, by the midpoint rule in t with x = sin(t)^2, where
    the density is tame.
    """
    t = (np.arange(1 << 16) + 0.5) * (np.pi / 2 / (1 << 16))
    density = (np.sin(t) * np.cos(t)) ** (2 * alpha - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density)])
    edges = np.sin(np.arange(len(t) + 1) * (np.pi / 2 / len(t))) ** 2
    return np.interp(np.linspace(0, 1, count), cumulative / cumulative[-1], edges)
