"""Images without labels, as evaluation sees images: decoded when they are asked for, kept nowhere."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtf.api.recipe import Dataset
from dtf.core.errors import DataError
from dtf.recipes.resnet.decode import decode_image
from dtf.recipes.resnet.images import Images
from dtf.recipes.resnet.listing import Judgements, Listing, list_folder
from dtf.recipes.resnet.store import Store, reason

if TYPE_CHECKING:
    from torch import Tensor

DEEPEST = 64
"""Names in a path of an input."""


def list_inputs(folder: Path) -> Listing:
    """Images below a folder, in order of names, those that cannot be read included. DataError when there is none."""
    if not folder.is_dir():
        raise DataError(f"job.input={folder} is no folder of images")
    try:
        found = list_folder(folder, Judgements(folder, None), DEEPEST, strict=False)
    except DataError as error:
        raise DataError(f"job.input={folder}: {error}") from error
    if not found.names:
        raise DataError(f"job.input={folder} holds no image that Pillow can read, under whatever name")
    found.names.sort()
    return found


def digest(names: Sequence[str]) -> str:
    """Text that differs when the names do."""
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    return f"{zlib.crc32(text):08x}"


class Unlabelled(Dataset):
    """Images of a folder, of `pixels` x `pixels`; the label of each is 0. One that cannot be read is black."""

    def __init__(self, folder: Path, found: Listing, pixels: int, mean: Sequence[float], std: Sequence[float]) -> None:
        names = tuple(found.names)
        self._store = Store(folder, names, None, digest(names), found.unreadable)
        self._folder, self._pixels, self._mean, self._std = folder, pixels, mean, std
        self.bad: dict[int, str] = {}
        self.left_out = found.left_out
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "decode")

    def __len__(self) -> int:
        return len(self._store)

    def fingerprint(self) -> str:
        return f"{len(self)} images {self._store.digest}"

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        pixels = np.stack(list(self._threads.map(self._decode, ids.tolist())))
        return Images(pixels, np.zeros(len(ids), np.int64), self._mean, self._std).fetch(np.arange(len(ids)), epoch)

    def _decode(self, row: int) -> np.ndarray:
        try:
            return decode_image(self._store[row], self._pixels)
        except (OSError, ValueError) as error:
            name, why = self._store.names[row], reason(error)
            if not self.allowed:
                raise DataError(f"{self._folder / name} cannot be used: {why}; replace or remove it") from error
            self.bad[row] = f"{name}: {why}"
            return np.zeros((self._pixels, self._pixels, 3), np.uint8)
