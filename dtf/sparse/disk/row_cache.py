"""Rows in memory up to a bound: an index by id, and a clock that says which may go. Knows no files."""

from __future__ import annotations

import numpy as np

from dtf.core.errors import ConfigError
from dtf.sparse.disk import cache_kernels as kernels
from dtf.sparse.disk import page_kernels
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.id_kernels import round_rows
from dtf.sparse.row_index import reserve

LAST_STEP = 2**31 - 1
_SLOTS = 2  # of the index, for each row
_PER_ROW = 4 * _SLOTS + 8 + 4 + 4 + 1 + 1  # bytes beside a row: slots, id, next use, next of its list, flags, uses
_BUCKET_BITS = 12


class RowCache:
    """At most as many rows as fit into `memory_bytes`, one at least, at positions of `records` and `extra`. For one
    thread.

    `records` (C, width + states): a row and its state side by side. `extra` (C, bytes).
    """

    def __init__(self, form: RecordFormat, memory_bytes: int, low: int, high: int) -> None:
        """For ids with hashes in [low, high]."""
        self.form = form
        self.row_bytes = form.stride * form.dtype.itemsize + form.extra + _PER_ROW
        self.capacity = capacity = max(1, min(memory_bytes // self.row_bytes, 2**31 // _SLOTS - 1))
        try:
            self.records = reserve(capacity, form.stride, form.dtype)
            self.extra = reserve(capacity, form.extra, np.dtype(np.uint8))
            self.ids = reserve(capacity, 1, np.dtype(np.int64)).reshape(-1)
            self._next_use = reserve(capacity, 1, np.dtype(np.int32)).reshape(-1)
            self._slots = reserve(_SLOTS * capacity, 1, np.dtype(np.int32)).reshape(-1)
            self._next = reserve(capacity, 1, np.dtype(np.int32)).reshape(-1)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"this host has no room for {memory_bytes / 1e9:.3g} GB of rows: {error}; set a smaller "
                "sparse.memory_gb"
            ) from error
        self.flags, self._uses = np.zeros(capacity, np.uint8), np.zeros(capacity, np.uint8)
        # lists of positions: free ones, and dirty rows by the upper bits of their hash; a position is in one at most.
        # Position + 1 of the first, and how many there are
        self._low, self._shift = low, max(0, (high - low).bit_length() - _BUCKET_BITS)
        buckets = ((high - low) >> self._shift) + 1
        self._free, self._dirty = np.zeros(1, np.int32), np.zeros(buckets, np.int32)
        self._counts = np.zeros(buckets, np.int64)
        self._top = self._free_count = self._hand = 0  # positions from `top` on were never used
        self._bytes, self._words = self.records.view(np.uint8), self.records.view(np.uint32)

    @property
    def byte_count(self) -> int:
        """Bytes of the rows that are here, and of their index."""
        return (self._top - self._free_count) * self.row_bytes

    def find(self, ids: np.ndarray, with_absent: bool = False) -> tuple[np.ndarray, int]:
        """Positions (n,) of ids: NOT_CACHED, or NO_ROW for one that is known to have none (`with_absent`: where it is
        known so). And how many are not cached.
        """
        positions = np.empty(len(ids), np.int64)
        return positions, kernels.find(self._slots, self.ids, self.flags, ids, with_absent, positions)

    def take(self, count: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """At most `count` free positions, and the ids whose rows went for them. Only clean rows go, and none that is
        held or needed by the steps [first, last].
        """
        taken = np.empty(count, np.int64)
        reused = min(count, self._free_count)
        self._free_count -= reused
        kernels.walk(self._free, self._next, taken[:reused])
        fresh = min(count - reused, self.capacity - self._top)
        taken[reused : reused + fresh] = np.arange(self._top, self._top + fresh)
        self.ids[self._top : self._top + fresh] = -1
        done = reused + fresh
        forgotten, gone = np.empty(count - done, np.int64), 0
        if done < count:
            gone, self._hand = kernels.evict(
                self._slots, self.ids, self.flags, self._uses, self._next_use, first, last, self._top, self._hand,
                taken[done:], forgotten,
            )  # fmt: skip
        self._top += fresh
        return taken[: done + gone], forgotten[:gone]

    def give_back(self, positions: np.ndarray) -> None:
        """Free positions that were taken and not used."""
        kernels.set_free(positions, self._free, self._next)
        self._free_count += len(positions)

    def insert(
        self, ids: np.ndarray, positions: np.ndarray, flags: np.ndarray | int, step: int = kernels.NEVER
    ) -> None:
        """Give ids that are not cached these free positions, needed next at `step`."""
        kernels.insert(self._slots, self.ids, ids, positions)
        self.flags[positions] = flags
        self._uses[positions] = 0
        self._next_use[positions] = step

    def hold(self, positions: np.ndarray) -> None:
        """Rows that `take` leaves until they are touched."""
        self._next_use[positions[positions >= 0]] = kernels.HELD

    def touch(self, positions: np.ndarray, step: int) -> None:
        """Rows are used at `step`."""
        kernels.touch(positions, self._uses, self._next_use, step)

    def await_use(self, positions: np.ndarray, now: int, step: int) -> None:
        """Rows will be used at `step`."""
        kernels.await_use(positions, self._next_use, now, step)

    def set_dirty(self, positions: np.ndarray) -> int:
        """Rows differ from those on disk; their values are rounded as the disk keeps them. Returns how many were not
        dirty.
        """
        if self.form.narrow:
            round_rows(self._words, self.form.narrow, positions)
        return self._list(positions)

    def _list(self, positions: np.ndarray) -> int:
        low, shift = np.uint64(self._low), np.uint64(self._shift)
        return kernels.set_dirty(positions, self.flags, self.ids, low, shift, self._dirty, self._counts, self._next)

    def _buckets(self, low: int, high: int) -> slice:
        return slice((low - self._low) >> self._shift, ((high - self._low) >> self._shift) + 1)

    def _walk(self, some: slice) -> np.ndarray:
        found = np.empty(self._counts[some].sum(), np.int64)
        kernels.walk(self._dirty[some].copy(), self._next, found)
        return found

    def dirty_from(self, lows: np.ndarray) -> np.ndarray:
        """About how many rows are dirty in each of the ranges that begin at `lows` (n,) uint64."""
        return np.add.reduceat(self._counts, ((lows - np.uint64(self._low)) >> np.uint64(self._shift)).astype(np.int64))

    def dirty_in(self, low: int, high: int) -> np.ndarray:
        """Positions of the dirty rows of a range, in any order."""
        found = self._walk(self._buckets(low, high))
        hashed = np.empty(len(found), np.uint64)
        page_kernels.hashes(self.ids[found], hashed)
        return found[(hashed >= np.uint64(low)) & (hashed <= np.uint64(high))]

    def begin_writing(self, positions: np.ndarray, low: int, high: int) -> np.ndarray:
        """Some dirty rows of a range are clean as soon as what is encoded now is written. Returns which of them are
        removed, bool (n,).
        """
        removed, some = np.empty(len(positions), np.bool_), self._buckets(low, high)
        every = self._walk(some) if len(positions) < self._counts[some].sum() else positions
        kernels.begin_writing(positions, self.flags, removed)
        self._dirty[some] = self._counts[some] = 0
        others = every[self.flags[every] & kernels.DIRTY != 0]
        self.flags[others] &= ~np.uint8(kernels.DIRTY)
        self._list(others)
        return removed

    def end_writing(self, positions: np.ndarray, removed: np.ndarray, written: bool) -> int:
        """Returns how many rows are dirty again."""
        kernels.end_writing(positions, self.flags, removed, written)
        return 0 if written else self._list(positions)

    def encode(self, positions: np.ndarray) -> np.ndarray:
        """Records (n, size) of rows."""
        out = np.empty((len(positions), self.form.size), np.uint8)
        kernels.encode(self.ids, self._bytes, self._words, self.extra, positions, self.form.narrow, out)
        return out

    def decode(self, records: np.ndarray, chosen: np.ndarray, positions: np.ndarray) -> None:
        """Rows at `positions` (n,) become what `records[chosen]` hold."""
        kernels.decode(records, chosen, positions, self._bytes, self._words, self.extra, self.form.narrow)


def by_hash(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Positions by ascending hash of their ids."""
    hashed = np.empty(len(positions), np.uint64)
    page_kernels.hashes(ids[positions], hashed)
    return positions[np.argsort(hashed)]


def decoded(records: np.ndarray, form: RecordFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids (n,), rows with their states (n, width + states), extra (n, bytes) of records (n, size)."""
    ids, rows = np.empty(len(records), np.int64), np.empty((len(records), form.stride), form.dtype)
    extra, every = np.empty((len(records), form.extra), np.uint8), np.arange(len(records))
    kernels.ids_of(records, ids)
    kernels.decode(records, every, every, rows.view(np.uint8), rows.view(np.uint32), extra, form.narrow)
    return ids, rows, extra
