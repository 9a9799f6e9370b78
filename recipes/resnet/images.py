"""A data set of equally sized images in memory, with crop and flip. Knows nothing of where the images came from."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Dataset
from dtf.core.seeding import draws


class Images(Dataset):
    """Bytes (N, H, W, 3) and labels (N,) as normalised float32 (B, 3, H, W) and int64 (B,).

    `crop_pad` and `flip` augment: zeros are put around the image, a window of its size is cut out at random, and half
    of the windows are mirrored; both depend on (seed, epoch, id) alone. Leave them at 0 and False for evaluation.
    `digest` stands for the content of `pixels` in the fingerprint when it is known already.

    Inputs keep the channels-last order of the bytes in memory. Convolutions on CPU take the layout of their input, and
    are faster in this one, whatever the layout of the parameters.
    """

    repeats = True

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        crop_pad: int = 0,
        flip: bool = False,
        seed: int = 0,
        digest: str = "",
    ) -> None:
        self._pixels, self._labels = pixels, labels.astype(np.int64)
        self._crop_pad, self._flip, self._seed, self._digest = crop_pad, flip, seed, digest
        width = pixels.shape[2]
        # of one row of pixels, so that the last axis is long
        self._mean = torch.tensor(mean, dtype=torch.float32).mul(255).repeat(width)
        self._scale = torch.tensor(std, dtype=torch.float32).mul(255).reciprocal().repeat(width)

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        rows = ids % len(self)
        pixels = self._pixels[rows]
        if self._crop_pad or self._flip:
            pixels = augment(pixels, draws(self._seed, epoch, ids, 3), self._crop_pad, self._flip)
        count, height, width, channels = pixels.shape
        lines = torch.from_numpy(pixels).view(count, height, width * channels).float()
        inputs = lines.sub_(self._mean).mul_(self._scale).view(count, height, width, channels).permute(0, 3, 1, 2)
        return inputs, torch.from_numpy(self._labels[rows])

    def groups(self) -> np.ndarray:
        return self._labels

    def unaugmented(self) -> Images:
        plain = copy.copy(self)
        plain._crop_pad, plain._flip = 0, False
        return plain

    def fingerprint(self) -> str:
        """Rows, size and crc32 of the bytes and labels."""
        digest = self._digest or f"{zlib.crc32(np.ascontiguousarray(self._pixels).data):08x}"
        return (
            f"{len(self)} rows of {'x'.join(map(str, self._pixels.shape[1:]))}, pixels {digest}, labels "
            f"{zlib.crc32(self._labels.data):08x}"
        )


def augment(pixels: np.ndarray, uniform: np.ndarray, crop_pad: int, flip: bool) -> np.ndarray:
    """Crop and mirror (B, H, W, 3) by uniform draws (B, 3) in [0, 1): top, left, mirror.

    Source: He et al. 2015 (arXiv:1512.03385), section 4.2, after Lee et al. 2015 (arXiv:1409.5185); 4 pixels there.
    """
    count, height, width, channels = pixels.shape
    padded = np.zeros((count, height + 2 * crop_pad, width + 2 * crop_pad, channels), pixels.dtype)
    padded[:, crop_pad : crop_pad + height, crop_pad : crop_pad + width] = pixels
    corners = (uniform[:, :2] * (2 * crop_pad + 1)).astype(np.int64).tolist()
    mirrored = (uniform[:, 2] < 0.5).tolist() if flip else [False] * count
    out = np.empty_like(pixels)
    for row, ((top, left), mirror) in enumerate(zip(corners, mirrored, strict=True)):
        window = padded[row, top : top + height, left : left + width]
        out[row] = window[:, ::-1] if mirror else window
    return out


def thin(rows: int, keep: int) -> np.ndarray:
    """`keep` row numbers spread evenly over `rows`, int64: rows sorted by class keep their balance."""
    return np.arange(keep) * rows // keep
