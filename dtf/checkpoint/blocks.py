"""Reads the files of a checkpoint by blocks, and compares the digest of each. Knows no tensors, imports no torch."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from dtf.checkpoint.manifest import BLOCK_BYTES, NAME, StoredFile
from dtf.core.errors import DataError

_CACHED_BLOCKS = 8
_THREADS = 4  # of one process that read a file: they wait for memory, more do not help
_BLOCKS_A_THREAD = 8  # fewer are read sooner than a thread starts


class Blocks:
    """Reads one file of a checkpoint.

    Every byte handed out belongs to a block whose digest was compared, after it was read. Many blocks are read by
    several threads.
    """

    def __init__(self, folder: Path, name: str, stored: StoredFile) -> None:
        if not NAME.fullmatch(name):
            raise DataError(f"unusable file name {ascii(name)[:120]}")
        self._path, self._stored = folder / name, stored
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(self._whole)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), writable. DataError when a block they touch is damaged."""
        data = memoryview(bytearray(stop - start))
        self.read_into(start, data)
        return data

    def read_into(self, start: int, data: memoryview) -> None:
        """Fill `data` with the bytes from `start` on. DataError when a block they touch is damaged; what is in `data`
        then is of no use.
        """
        stop = start + len(data)
        first, last = -(-start // BLOCK_BYTES), stop // BLOCK_BYTES
        if stop == self._stored.size:
            last = len(self._stored.crc32)
        for number in sorted({start // BLOCK_BYTES, -(-stop // BLOCK_BYTES) - 1} - set(range(first, last))):
            if start < stop:  # blocks that are not wanted whole are those of small tensors: read and compare them once
                base = number * BLOCK_BYTES
                begin, end = max(start, base), min(stop, base + BLOCK_BYTES)
                data[begin - start : end - start] = self._block(number)[begin - base : end - base]
        damaged = self._read(range(first, last), data[first * BLOCK_BYTES - start :])
        if damaged:
            raise DataError(self.damage(damaged[0], damaged[0] + 1))

    def damaged(self, numbers: range) -> set[int]:
        """Which of these blocks are not as they were written, or cannot be read."""
        try:
            return set(self._read(numbers))
        except DataError:
            return set(numbers)

    def damage(self, first: int, last: int) -> str:
        """Text for damage in blocks [first, last)."""
        return (
            f"{self._path.name}: bytes {first * BLOCK_BYTES} to {min(last * BLOCK_BYTES, self._stored.size)} are "
            "damaged or unreadable"
        )

    def _whole(self, number: int) -> bytes:
        data = bytearray(min(BLOCK_BYTES, self._stored.size - number * BLOCK_BYTES))
        if self._read(range(number, number + 1), memoryview(data)):
            raise DataError(self.damage(number, number + 1))
        return bytes(data)

    def _read(self, numbers: range, into: memoryview | None = None) -> list[int]:
        """Read these blocks into `into`, in this order, or only look at them. Returns the numbers of damaged ones."""
        if not numbers:
            return []
        file, size = open_regular(self._path)
        try:
            if size != self._stored.size:
                raise DataError(f"{self._path.name}: has {size} bytes instead of {self._stored.size}")

            def look(part: range) -> list[int]:
                damaged, room = [], None if into is not None else memoryview(bytearray(BLOCK_BYTES))
                for number in part:
                    start = number * BLOCK_BYTES
                    if room is None:
                        assert into is not None
                        block = into[start - numbers.start * BLOCK_BYTES :][:BLOCK_BYTES]
                    else:
                        block = room
                    block = block[: size - start]
                    if fill(file, block, start) < len(block) or crc32(block) != self._stored.crc32[number]:
                        damaged.append(number)
                return damaged

            return [number for found in _by_threads(look, numbers) for number in found]
        finally:
            os.close(file)


def _by_threads(look: Callable[[range], list[int]], numbers: range) -> list[list[int]]:
    """What `look` returns for parts of `numbers`, in order."""
    count = min(_THREADS, len(os.sched_getaffinity(0)), len(numbers) // _BLOCKS_A_THREAD)
    if count < 2:
        return [look(numbers)]
    bounds = [len(numbers) * index // count for index in range(count + 1)]
    parts = [numbers[a:b] for a, b in pairwise(bounds)]
    try:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(look, parts))
    except RuntimeError:  # the machine has no more threads now
        return [look(numbers)]


def open_regular(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file; links are not followed, a pipe is not waited for."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EIO, errno.EISDIR, errno.ENXIO):
            raise DataError(f"{path.name}: {error.strerror}") from None
        raise
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise DataError(f"{path.name}: is no regular file")
    return file, status.st_size


def fill(file: int, data: memoryview, offset: int) -> int:
    """Read into `data` from `offset`; bytes read, fewer at the end of the file or where the device fails."""
    done = 0
    while done < len(data):
        try:
            count = os.preadv(file, [data[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            count = 0
        if not count:
            break
        done += count
    return done
