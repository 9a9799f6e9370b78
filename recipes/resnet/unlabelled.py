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
from dtf.recipes.resnet.tree import SUFFIXES

if TYPE_CHECKING:
    from torch import Tensor


def image_names(folder: Path) -> list[str]:
    """Images below a folder, relative to it, in order of names. DataError when there is none."""
    if not folder.is_dir():
        raise DataError(f"job.input={folder} is no folder of images")
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not names:
        raise DataError(
            f"job.input={folder} holds no image; files that end with {', '.join(sorted(SUFFIXES))} are taken for some"
        )
    return names


def digest(names: Sequence[str]) -> str:
    """Text that differs when the names do."""
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    return f"{zlib.crc32(text):08x}"


class Unlabelled(Dataset):
    """Images by name below a folder, of `pixels` x `pixels`; the label of each is 0."""

    def __init__(
        self, folder: Path, names: Sequence[str], pixels: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self._folder, self._names, self._pixels, self._mean, self._std = folder, names, pixels, mean, std
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "decode")

    def __len__(self) -> int:
        return len(self._names)

    def fingerprint(self) -> str:
        return f"{len(self)} images {digest(self._names)}"

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        pixels = np.stack(list(self._threads.map(self._decode, ids.tolist())))
        return Images(pixels, np.zeros(len(ids), np.int64), self._mean, self._std).fetch(np.arange(len(ids)), epoch)

    def _decode(self, row: int) -> np.ndarray:
        path = self._folder / self._names[row]
        try:
            return decode_image(path.read_bytes(), self._pixels)
        except Exception as error:  # whatever a decoder makes of a broken file
            raise DataError(
                f"{path} cannot be decoded: {str(error)[:200] or type(error).__name__}; replace or remove it"
            ) from error
