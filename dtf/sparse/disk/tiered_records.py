"""The records of a table that is larger than memory: a cache over a partitioned run. Takes and returns numpy arrays,
uses no torch, and knows neither optimizers nor how rows are drawn.

All that changes the cache or the list of segments happens in the caller's thread. Other threads read pages for a step
that is told ahead, and write segments, from copies; the next call takes what they have done. So no lock is needed, and
no number depends on what was in memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtf.core.errors import ConfigError, DataError, SaveError, io_failure
from dtf.core.text import count_text
from dtf.sparse.disk.cache_kernels import ABSENT, DIRTY, NOT_CACHED, STORED, WRITING
from dtf.sparse.disk.partitioned_run import PartitionedRun, Range, Reading, Sweeper, contents
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.row_cache import LAST_STEP, RowCache, by_hash, decoded
from dtf.sparse.disk.segment import LAST

DEPTH = 32
"""Reads at a time."""
DIRTY_SHARE = 0.7
"""Of the cache: sweeps go on while more rows than that are dirty. More of them make sweeps cheaper, fewer leave more
choice of what goes.
"""
FILTER_SHARE = 1 / 8
"""Of the memory: what filters may take."""
RANGES, RANGE_BYTES = (4, 64), 1 << 20
"""Ranges of an empty table, of about so many bytes in memory each: a sweep writes some of these, and must pay for its
files.
"""
SEGMENT_BYTES = 128 << 20
"""A base of more than twice as many is divided: each has up to nine open files, and one is written at a time."""
MOST_REMOVED = 0.25
"""Of the dirty rows of a range: a delta cannot say that rows are gone, so these wait for the next base, unless there
are more.
"""
ENDING = ".rows"
_STACK_BYTES = 1 << 19


class _Sweep(NamedTuple):
    part: Range
    positions: np.ndarray
    removed: np.ndarray
    made: Future[list[Range]]


class _Prefetch(NamedTuple):
    reading: Reading
    step: int


class TieredRecords:
    """Rows by id, at most `memory_bytes` of them in memory, the others in `folder`, which is this object's alone: files
    that a killed process left there are removed. The hashes of ids are in [low, high]. The ids of one call are
    distinct; -1 stands for no row. `ranges`: into which hashes are divided at first; None: as the memory is. `name`: of
    the table, for errors.

    Positions index `records` (C, width + states) and `extra` (C, bytes). They hold until the next call of a method
    that takes ids. Who changes rows says so with `changed` before that.

    Methods raise SaveError where the disk is full or fails, DataError where a page is damaged, ConfigError where the
    rows of one call do not fit into memory. The table is as before then, and may be saved elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        form: RecordFormat,
        memory_bytes: int,
        low: int = 0,
        high: int = LAST,
        depth: int = DEPTH,
        ranges: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        dirty_share: float = DIRTY_SHARE,
        name: str = "",
    ) -> None:
        self.folder, self.form, self._name, self._memory_bytes = folder, form, name, memory_bytes
        filters = int(FILTER_SHARE * memory_bytes)
        self.cache = RowCache(form, memory_bytes - filters, low, high)
        self.records, self.extra = self.cache.records, self.cache.extra
        if ranges is None:
            ranges = max(RANGES[0], min(1 << (self.cache.capacity * form.size // RANGE_BYTES).bit_length(), RANGES[1]))
        self.least_ranges = ranges
        self.run = PartitionedRun(form, low, high, ranges)
        self.rows = self.dirty = 0
        self.hits = self.misses = self.pages_read = self.rows_swept = self.bytes_swept = 0
        self._depth = depth
        self._sweeper = Sweeper(form, max(1, segment_bytes // form.size), filters, self.new_path)
        self._most_dirty = int(dirty_share * self.cache.capacity)
        self._readers = reading_threads(depth, os.getpid())
        self._writer = ThreadPoolExecutor(1, "sweep")
        self._sweep: _Sweep | None = None
        self._prefetch: _Prefetch | None = None
        self._forgotten: list[np.ndarray] = []  # ids that left the cache since the prefetch began
        self._step = self._files = 0
        self._needed = 0  # rows of the last call that must be in memory together
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_files()
        except OSError as error:
            raise io_failure(error, folder) or error from error

    def __len__(self) -> int:
        return self.rows

    def byte_count(self) -> int:
        """Bytes of the rows that are in memory, and of what finds rows."""
        return self.cache.byte_count + self.run.filter_bytes + sum(file.firsts.nbytes for file in self.run.files)

    # ------------------------------------------------------------ rows

    def place(self, ids: np.ndarray, step: int) -> np.ndarray:
        """Positions (n,) of the rows of ids (n,), all in memory now; -1 for those without a row. `step`: the one that
        needs them, never less than before.
        """
        self._step, self._needed = step, int((ids != -1).sum())
        self._settle()
        positions, missing = self.cache.find(ids)
        if missing and self._prefetch is not None:
            self._arrive()
            positions, missing = self.cache.find(ids)
        self.hits, self.misses = self.hits + len(ids) - missing, self.misses + missing
        if missing:
            # with those of ids without a row: else `make` had to find room, and could move rows of this call
            held, _ = self.cache.find(ids, with_absent=True)
            self.cache.hold(held)
            try:
                self._absorb(self.run.read(ids[positions == NOT_CACHED], self._readers, self._depth), step)
            finally:
                self.cache.touch(held, step)
            positions, _ = self.cache.find(ids)
        else:
            self.cache.touch(positions, step)
        return np.maximum(positions, -1)

    def make(self, ids: np.ndarray) -> np.ndarray:
        """Positions (n,) of new rows for ids (n,) without a row, all zeros. After `place` of the same ids, nothing is
        read and no row moves.
        """
        self._settle()
        positions = self._reserve(ids, ABSENT)
        there = ids != -1
        own = positions[there]
        if (self.cache.flags[own] & ABSENT == 0).any():
            raise ValueError("an id has a row already")
        self.cache.flags[own] &= np.uint8(WRITING | DIRTY | STORED)
        self.records[own] = 0
        self.extra[own] = 0
        self.rows += len(own)
        self.changed(own)
        return np.where(there, positions, -1)

    def _reserve(self, ids: np.ndarray, flags: int) -> np.ndarray:
        """Positions (n,) of ids, whether they have a row or not; those that are not cached get one with these flags."""
        positions, missing = self.cache.find(ids, with_absent=True)
        if missing:
            new = np.flatnonzero(positions == NOT_CACHED)
            self.cache.hold(positions)
            try:
                positions[new] = self._allocate(len(new))
            finally:
                self.cache.touch(positions[positions >= 0], self._step)
            self.cache.insert(ids[new], positions[new], flags)
        return positions

    def changed(self, positions: np.ndarray) -> None:
        """Rows at `positions` have other numbers now; -1 is passed over. Values are rounded as the disk keeps them."""
        self.dirty += self.cache.set_dirty(positions)

    def remove(self, ids: np.ndarray) -> None:
        """Remove the rows of ids (n,), each of which has one. Nothing is read."""
        self._settle()
        positions = self._reserve(ids, STORED)
        self.cache.flags[positions] |= np.uint8(ABSENT)
        self.rows -= len(positions)
        self.dirty += self.cache.set_dirty(positions)

    def prefetch(self, ids: np.ndarray, step: int) -> None:
        """Begin to read what `place` of these ids at a coming step will need, and keep their rows until then."""
        self._settle()
        self._arrive()
        positions, missing = self.cache.find(ids)
        self.cache.await_use(positions, self._step, step)
        if missing:
            reading = self.run.read(ids[positions == NOT_CACHED], self._readers, self._depth)
            self._prefetch, self._forgotten = _Prefetch(reading, step), []
            self.misses, self.hits = self.misses + missing, self.hits - missing

    def expect(self, ids: np.ndarray, step: int) -> None:
        """Keep the rows of these ids that are in memory until `step`, as far as there is room."""
        self.cache.await_use(self.cache.find(ids)[0], self._step, step)

    def scan(self, low: int = 0, high: int = LAST) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All rows with hashes in [low, high] by ascending hash, some at a time, as copies: ids (n,), rows with their
        states (n, width + states), extra (n, bytes). No other method may be called meanwhile.
        """
        if self._sweep is not None and self._sweep.part.low <= high and self._sweep.part.high >= low:
            with suppress(SaveError):  # all rows are there without it; the next sweep says so again
                self.finish_sweep()
        for part in [each for each in self.run.ranges if each.low <= high and each.high >= low]:
            ends = max(low, part.low), min(high, part.high)
            positions = by_hash(self.cache.ids, self.cache.dirty_in(*ends))
            removed = self.cache.flags[positions] & ABSENT != 0
            try:
                for batch in contents(part.files, *ends, self.cache.encode(positions), removed):
                    yield decoded(batch, self.form)
            except OSError as error:
                raise io_failure(error, self.folder) or error from error

    def close(self) -> None:
        """End what goes on and remove all files."""
        self._writer.shutdown(cancel_futures=True)
        if self._prefetch is not None:
            with suppress(OSError, DataError):  # nobody wants these rows
                self._prefetch.reading.wait()
        self._sweep = self._prefetch = None
        self.run = PartitionedRun(self.form, self.run.low, self.run.high)
        self._remove_files()

    # ------------------------------------------------------------ what comes from other threads

    def _settle(self) -> None:
        """Take the sweep that has ended, begin the next one where too many rows are dirty."""
        if self._sweep is not None and self._sweep.made.done():
            self.finish_sweep()
        if self._sweep is None and self.dirty > self._most_dirty:
            self._begin_sweep()

    def _arrive(self) -> None:
        """Wait for the rows that are read ahead, and take them."""
        if self._prefetch is not None:
            (reading, step), self._prefetch = self._prefetch, None
            forgotten, self._forgotten = self._forgotten, []
            self._absorb(reading, max(step, self._step), forgotten)

    def _absorb(self, reading: Reading, step: int, forgotten: Sequence[np.ndarray] = ()) -> None:
        """Put what was read into the cache, but for what is there or was there and is `forgotten`: that is newer."""
        try:
            reading.wait()
        except OSError as error:
            raise io_failure(error, self.folder) or error from error
        self.pages_read += reading.pages
        fresh = self.cache.find(reading.ids, with_absent=True)[0] == NOT_CACHED
        if forgotten:
            fresh &= ~np.isin(reading.ids, np.concatenate(forgotten))
        chosen = np.flatnonzero(fresh)
        positions = self._allocate(len(chosen))
        found = reading.found[chosen] != 0
        self.cache.insert(reading.ids[chosen], positions, np.where(found, np.uint8(STORED), np.uint8(ABSENT)), step)
        self.cache.decode(reading.records, chosen[found], positions[found])

    def replace(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Put `records` (n, size) in place of the rows of ids (n,), whether they are there or not."""
        positions = self.place(ids, self._step)
        absent = np.flatnonzero(positions < 0)
        positions[absent] = self.make(ids[absent])
        self.cache.decode(records, np.arange(len(ids)), positions)
        self.changed(positions)

    def _allocate(self, count: int) -> np.ndarray:
        """Free positions (count,). Rows that no known step needs go first, by recency, then those of far steps; where
        too few are clean, sweeps are waited for.
        """
        taken = np.empty(0, np.int64)
        try:
            for first, last in ((self._step, LAST_STEP), (self._step, self._step), (1, 0)):
                if len(taken) < count:
                    taken = np.concatenate([taken, self._take(count - len(taken), first, last)])
            while len(taken) < count and self._sweep_one():
                taken = np.concatenate([taken, self._take(count - len(taken), 1, 0)])
            if len(taken) < count:
                raise self._no_room(max(self._needed, count))
        except BaseException:
            self.cache.give_back(taken)
            raise
        return taken

    def _no_room(self, rows: int) -> ConfigError:
        wanted = 1.05 * rows * self.cache.row_bytes / (1 - FILTER_SHARE)  # two digits of it are enough
        return ConfigError(
            f"table {self._name} has {self._memory_bytes / 1e9:.3g} GB of sparse.memory_gb here, room for "
            f"{count_text(self.cache.capacity, 'row')}; one step needs {rows:,}, about {wanted / 1e9:.2g} GB; give more"
        )

    def _take(self, count: int, first: int, last: int) -> np.ndarray:
        taken, forgotten = self.cache.take(count, first, last)
        if self._prefetch is not None and len(forgotten):
            self._forgotten.append(forgotten)
        return taken

    # ------------------------------------------------------------ sweeps

    def _sweep_one(self) -> bool:
        """Wait for the sweep that goes on, or for one more. False: there is nothing to write."""
        if self._sweep is None:
            self._begin_sweep()
        if self._sweep is None:
            return False
        self.finish_sweep()
        return True

    def _begin_sweep(self) -> None:
        """Write the dirty rows of the range that has most of them, in another thread."""
        for index in np.argsort(-self.cache.dirty_from(self.run.lows)) if self.dirty else ():
            part = self.run.ranges[index]
            positions, filters = self.cache.dirty_in(part.low, part.high), self.run.filter_bytes
            if not len(positions):
                continue
            removed = self.cache.flags[positions] & ABSENT != 0
            delta = self._sweeper.fits(part, len(positions), filters) and removed.mean() <= MOST_REMOVED
            if delta:
                positions = positions[~removed]
            new = int((self.cache.flags[positions] & STORED == 0).sum())
            records = self.cache.encode(positions)
            removed = self.cache.begin_writing(positions, part.low, part.high)
            self.dirty -= len(positions)
            write = self._sweeper.write_delta if delta else self._sweeper.write_base
            made = self._writer.submit(write, part, records, removed, filters, new)
            self._sweep = _Sweep(part, positions, removed, made)
            return

    def finish_sweep(self) -> None:
        """Wait for the sweep that goes on, if one does. After an error its rows are dirty as before."""
        if self._sweep is None:
            return
        (part, positions, removed, made), self._sweep = self._sweep, None
        try:
            new = made.result()
        except BaseException as error:
            self.dirty += self.cache.end_writing(positions, removed, False)
            if isinstance(error, OSError):
                raise io_failure(error, self.folder) or error from error
            raise
        self.cache.end_writing(positions, removed, True)
        self.run.replace(part, new)
        self.rows_swept += len(positions)
        self.bytes_swept += sum(file.stored.size for each in new for file in each.files if file not in part.files)

    def new_path(self) -> Path:
        """A name for one more file."""
        self._files += 1
        return self.folder / f"{self._files:010d}{ENDING}"

    def _remove_files(self) -> None:
        for name in os.listdir(self.folder):
            if name.endswith((ENDING, f"{ENDING}.tmp")):
                os.unlink(self.folder / name)


@lru_cache(1)
def reading_threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads for all tables of a process that have begun, with stacks so small that none takes a large page of memory.
    `process`: its id, as a fork has none of them.
    """
    before, all_run = threading.stack_size(_STACK_BYTES), threading.Barrier(count + 1)
    try:
        threads = ThreadPoolExecutor(count, "rows")
        for _ in range(count):
            threads.submit(all_run.wait)
        all_run.wait()
    except RuntimeError as error:  # the machine has no more threads now
        all_run.abort()
        threads.shutdown(cancel_futures=True)
        raise ConfigError(f"sparse.disk reads by {count} threads, and this host lets no more start: {error}") from error
    finally:
        threading.stack_size(before)
    return threads
