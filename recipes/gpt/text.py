"""Bytes of files, as rows of a language model. The files are mapped, not read, so they may be larger than memory."""

from __future__ import annotations

import glob
import os
import zlib
from dataclasses import dataclass

import numpy as np

from dtf.core.errors import DataError

_SAMPLE = 1 << 16  # bytes, of each file's start, middle and end


@dataclass(frozen=True)
class Files:
    """Files one after the other, as one text."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes

    @classmethod
    def find(cls, path: str) -> Files:
        """The file, or those of a pattern such as `books/*.txt`, in the order of their names. DataError where there is
        none, or one that cannot be read.
        """
        key, plain = f"recipe.data.path={path}", os.path.expanduser(path)
        paths = [plain] if os.path.exists(plain) else sorted(glob.glob(plain, recursive=True))
        if not paths:
            known = "no file fits it" if glob.has_magic(plain) else "there is no such file"
            raise DataError(f"{key}: {known}; give a file, or a quoted pattern such as 'books/*.txt'")
        folder = next((found for found in paths if not os.path.isfile(found)), None)
        if folder is not None:
            raise DataError(f"{key}: {folder} is no file; give a file, or a quoted pattern such as '{folder}/*.txt'")
        closed = next((found for found in paths if not os.access(found, os.R_OK)), None)
        if closed is not None:
            raise DataError(f"{key}: {closed} cannot be read; change its permissions")
        sizes = tuple(os.path.getsize(found) for found in paths)
        if not sum(sizes):
            raise DataError(f"{key} is empty; give a file with text")
        return cls(tuple(paths), sizes)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    def cut(self, eval_share: float, length: int) -> int:
        """Where the text to train on ends and the text to evaluate begins, in bytes. DataError where either is shorter
        than a row of `length` bytes.
        """
        first = self.size - round(self.size * eval_share)
        if first <= length or self.size - first < length:
            raise DataError(
                f"recipe.data.path has {self.size:,} bytes: {first:,} to train and {self.size - first:,} to evaluate "
                f"(recipe.data.eval_share={eval_share:g}), and either needs more than recipe.data.length={length}; "
                "give more text or a smaller length"
            )
        return first


class Text:
    """Reads parts of files; see `Files`."""

    def __init__(self, files: Files) -> None:
        """DataError where a file has changed its size since it was found, or cannot be read."""
        self._ends = np.cumsum([size for size in files.sizes if size])
        self._parts: list[np.ndarray] = []
        for path, size in zip(files.paths, files.sizes, strict=True):
            if not size:
                continue
            try:
                part = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:
                raise DataError(f"recipe.data.path: {path} cannot be read: {error}") from error
            if len(part) != size:
                raise DataError(f"recipe.data.path: {path} changes while it is read; start again when it is complete")
            self._parts.append(part)

    def read(self, first: int, count: int) -> np.ndarray:
        """So many bytes from `first` on, uint8; fewer at the end of the text."""
        found, number = [], int(np.searchsorted(self._ends, first, "right"))
        while count > 0 and number < len(self._parts):
            part = self._parts[number]
            at = first - (int(self._ends[number]) - len(part))
            found.append(part[at : at + count])
            first, count, number = first + len(found[-1]), count - len(found[-1]), number + 1
        return np.concatenate(found) if found else np.empty(0, np.uint8)

    def digest(self) -> str:
        """Tells texts apart: their lengths, and a checksum of three samples of each file."""
        value = 0
        for part in self._parts:
            for at in (0, max(0, len(part) // 2 - _SAMPLE // 2), max(0, len(part) - _SAMPLE)):
                value = zlib.crc32(part[at : at + _SAMPLE].data, value)
        return f"{[len(part) for part in self._parts]} {value:08x}"
