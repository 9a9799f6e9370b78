"""The index of a sparse table: id -> position of its row; -1 where it has none. Positions are the caller's.

`items`: all ids, ascending, and their positions; with `flags` by position, those that have one.
"""

from __future__ import annotations

import mmap
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dtf.api.sparse_table import Table

_LEAST_SLOTS = 1024
_LONG = 8  # bytes of an id
_LARGE_PAGE = 1 << 21


def reserve(count: int, stride: int, dtype: np.dtype) -> np.ndarray:
    """Zeros (count, stride), at the start of a page of memory, that take memory when they are first written; in large
    pages where the system has them. OSError where there is no room.
    """
    size = max(1, count * stride * dtype.itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= _LARGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count * stride).reshape(count, stride)


def index_of(spec: Table, kernels: ModuleType) -> DirectIndex | HashedIndex:
    """What finds the rows of a table: a slot for each id of a range, where all of these take no more memory than the
    hashed slots of `most_rows` rows would; else hashed slots, which grow with the rows that exist.
    """
    # positions of shards leave gaps
    kind = np.dtype(np.int32 if spec.most_rows < 2**29 else np.int64)
    hashed_bytes = 2 * _LONG * _slots_for(spec.most_rows)
    if 0 < spec.size * kind.itemsize <= hashed_bytes:
        return DirectIndex(spec.size, kind, kernels)
    return HashedIndex(kernels)


class DirectIndex:
    """Ids below `size`: position + 1 of each, 0: none."""

    def __init__(self, size: int, kind: np.dtype, kernels: ModuleType) -> None:
        self.slots = reserve(size, 1, kind).reshape(-1)
        self._kernels = kernels

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        positions = np.empty(len(ids), np.int64)
        return positions, self._kernels.find_direct(self.slots, ids, positions)

    def insert(self, ids: np.ndarray, positions: np.ndarray) -> None:
        self.slots[ids] = positions + 1

    move = insert

    def remove(self, ids: np.ndarray) -> None:
        self.slots[ids] = 0

    def items(self, flags: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        ids = np.flatnonzero(self.slots) if flags is None else _flagged(self.slots, flags, self._kernels)
        return ids, self.slots[ids].astype(np.int64) - 1


class HashedIndex:
    """Any ids, by open addressing: at least half of the slots are empty."""

    def __init__(self, kernels: ModuleType) -> None:
        self.slots = np.zeros((_LEAST_SLOTS, 2), np.int64)  # id, position + 1; 0 in the second: empty
        self._count = 0
        self._kernels = kernels

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        positions = np.empty(len(ids), np.int64)
        return positions, self._kernels.find(self.slots, ids, positions)

    def insert(self, ids: np.ndarray, positions: np.ndarray) -> None:
        self._count += len(ids)
        wanted = _slots_for(self._count)
        if wanted > len(self.slots):
            larger = np.zeros((wanted, 2), np.int64)
            self._kernels.rehash(self.slots, larger)
            self.slots = larger
        self._kernels.insert(self.slots, ids, positions)

    def move(self, ids: np.ndarray, positions: np.ndarray) -> None:
        self._kernels.move(self.slots, ids, positions)

    def remove(self, ids: np.ndarray) -> None:
        self._kernels.remove(self.slots, ids)
        self._count -= len(ids)

    def items(self, flags: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        positions = self.slots[:, 1]
        used = self.slots[positions > 0 if flags is None else _flagged(positions, flags, self._kernels)]
        used = used[np.argsort(used[:, 0])]
        return used[:, 0].copy(), used[:, 1] - 1


def _flagged(positions: np.ndarray, flags: np.ndarray, kernels: ModuleType) -> np.ndarray:
    """Slots of the rows at positions with a flag. `positions`: of each slot its position + 1, 0: none."""
    found = np.empty(np.count_nonzero(flags), np.int64)
    return found[: kernels.flagged(positions, flags, found)]


def _slots_for(rows: int) -> int:
    """How many slots so many rows need: a power of two, at least twice the rows."""
    return max(_LEAST_SLOTS, 1 << (2 * rows - 1).bit_length())
