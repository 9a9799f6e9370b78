"""Files that together hold the records of all hashes: reads by id from many threads, and sweeps, which write what has
changed.

Each range of hashes has a base and a few deltas, which are newer. A sweep adds a delta, or makes base, deltas and
changes one base. So `MOST_DELTAS` sweeps rewrite a base once. Filters in memory say which file may hold a row, so that
about one page is read for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtf.core.errors import DataError
from dtf.sparse.disk import page_kernels as kernels
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.segment import Segment, filter_bytes, within, write_segment
from dtf.sparse.row_index import reserve

MOST_DELTAS = 8
"""Of a range. n of them rewrite the base every n sweeps, and take filters of n * dirty rows."""
_SETTLED = np.int32(2**31 - 1)


class Range(NamedTuple):
    """All records with hashes in [low, high]: those of a newer file are in place of those of older ones."""

    low: int
    high: int
    files: tuple[Segment, ...]  # the base, then deltas, oldest first; those without rows are not there

    @property
    def rows(self) -> int:
        """Records in all files; those of one id count as often as they are there."""
        return sum(file.rows for file in self.files)


class PartitionedRun:
    """All records on disk with hashes in [low, high]. `ranges`: by ascending hash, without gaps. Its methods are for
    one thread; what they read and write goes on in others. Memory: 8 bytes a page, and the filters.
    """

    def __init__(self, form: RecordFormat, low: int, high: int, ranges: int = 1, files: Sequence[Segment] = ()) -> None:
        """With `files` that lie in it; the rest is divided as if all were, into so many `ranges`. DataError where two
        are the same, or one is missing.
        """
        self.form, self.low, self.high = form, low, high
        self.ranges, at = list[Range](), low
        for (first, last), found in groupby(sorted(files, key=_place), key=lambda file: (file.low, file.high)):
            some = tuple(found)
            if first < at or [file.place for file in some] != list(range(len(some))):
                raise DataError(f"{some[0].path}: a file of hashes {first} to {last} is missing, or is there twice")
            self._leave_empty(at, first - 1, ranges)
            self.ranges.append(Range(first, last, some))
            at = last + 1
        self._leave_empty(at, high, ranges)
        self._settle()

    def _leave_empty(self, low: int, high: int, ranges: int) -> None:
        if low <= high:
            count = -(-(high - low + 1) * ranges // (self.high - self.low + 1))
            ends = split(low, high, min(count, high - low + 1))
            self.ranges += [Range(first, last, ()) for first, last in ends]

    def _settle(self) -> None:
        self.files = [file for each in self.ranges for file in each.files[::-1]]
        self.lows = np.array([each.low for each in self.ranges], np.uint64)
        self.starts = np.cumsum([0, *(len(each.files) for each in self.ranges)])
        self.table = np.array([file.about for file in self.files], np.int64).reshape(-1, 7)

    @property
    def filter_bytes(self) -> int:
        return sum(file.filter.nbytes for file in self.files)

    @property
    def past_cache(self) -> bool:
        """Whether all reads pass by the page cache; else what was read is dropped from it."""
        return all(file.direct for file in self.files)

    def replace(self, old: Range, new: list[Range]) -> None:
        """`new` cover the range of `old`. Files that are only in `old` go; reads that have begun end as they would
        have. One that the disk does not remove stays until the table is closed.
        """
        place = self.ranges.index(old)
        self.ranges[place : place + 1] = new
        self._settle()
        kept = {id(file) for each in new for file in each.files}
        for file in old.files:
            if id(file) not in kept:
                with suppress(OSError):
                    os.unlink(file.path)

    def read(self, ids: np.ndarray, threads: ThreadPoolExecutor, depth: int) -> Reading:
        """Begin to read the records of distinct ids (n,), with `depth` reads at a time."""
        return Reading(self, ids, threads, depth)


class Reading:
    """Records that are on their way."""

    def __init__(self, run: PartitionedRun, ids: np.ndarray, threads: ThreadPoolExecutor, depth: int) -> None:
        count = len(ids)
        self.ids, self.pages = ids, 0
        self.records = np.empty((count, run.form.size), np.uint8)
        self.found = np.zeros(count, np.uint8)
        # held as they are now, so that their files stay open
        self._files, self._where = run.files, (run.table, run.lows, run.starts)
        self._threads, self._form = threads, run.form
        hashed = np.empty(count, np.uint64)
        kernels.hashes(ids, hashed)
        self._order = np.argsort(hashed)
        self._hashed, self._by_hash = hashed[self._order], ids[self._order]
        self._owner, self._tried = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
        self._buffers = reserve(depth, run.form.page_bytes // 8, np.dtype(np.uint64))
        self._begin()

    def _begin(self) -> None:
        """Read the newest pages that may hold the records and were not tried."""
        jobs, owner = np.empty((len(self.ids), 4), np.int64), self._owner
        count = kernels.plan(*self._where, self._hashed, self._tried, owner, jobs)
        self._jobs, self.pages = jobs[:count], self.pages + count
        depth = min(len(self._buffers), count)
        self._parts: list[Future] = [
            self._threads.submit(
                kernels.read_jobs, self._jobs, first, depth, self._where[0], self._form.head_bytes, self._by_hash,
                self._hashed, owner, self._order, self._form.size, self._buffers[first], self.records, self.found,
            )
            for first in range(depth)
        ]  # fmt: skip

    def wait(self) -> None:
        """Until `records` of the ids that are `found` are there. DataError or OSError names the file and why."""
        while self._parts:
            ended = [part.result() for part in self._parts]
            for outcome, job in ended:
                if outcome != kernels.WHOLE:
                    raise self._files[self._jobs[job, 0]].damage(int(self._jobs[job, 1]), outcome)
            # a filter let others pass, or there is no filter: they may be in an older file
            missing = (self.found[self._order] == 0) & (self._owner >= 0)
            self._tried, self._owner = np.where(missing, self._owner, _SETTLED), np.full_like(self._owner, -1)
            self._begin()
        for file in self._files:
            if not file.direct:
                file.drop_cache()


def _place(file: Segment) -> tuple[int, int, int]:
    return file.low, file.high, file.place


def split(low: int, high: int, count: int) -> list[tuple[int, int]]:
    """[low, high] in `count` ranges of about the same size."""
    lows = [low + (high - low + 1) * index // count for index in range(count + 1)]
    return [(first, after - 1) for first, after in pairwise(lows)]


def contents(
    files: Iterable[Segment], low: int, high: int, records: np.ndarray, removed: np.ndarray
) -> Iterator[np.ndarray]:
    """Records (n, size) of a range's files with hashes in [low, high] after changes: sorted `records` are in place of
    those of the same ids, and `removed` (bool, for each of them) are not there. Valid until the next. Memory: a batch,
    and the deltas.
    """
    stream: Iterator[np.ndarray] = iter(())
    for number, file in enumerate(files):
        if number:
            newer = np.concatenate([chunk.copy() for chunk in file.chunks(low, high)] or [records[:0]])
            stream = _merged(stream, newer, np.zeros(len(newer), np.bool_))
        else:
            stream = file.chunks(low, high)
    return _merged(stream, records, removed)


def _merged(older: Iterator[np.ndarray], records: np.ndarray, removed: np.ndarray) -> Iterator[np.ndarray]:
    done = 0
    for old in older:
        if not len(old):
            continue
        last = np.empty(1, np.uint64)
        kernels.hashes_of(old[-1:], last)
        upto = done + len(within(records[done:], 0, int(last[0])))
        yield _one(old, records[done:upto], removed[done:upto])
        done = upto
    if done < len(records):
        yield _one(records[:0], records[done:], removed[done:])


def _one(old: np.ndarray, new: np.ndarray, removed: np.ndarray) -> np.ndarray:
    out = np.empty((len(old) + len(new), old.shape[1]), np.uint8)
    return out[: kernels.merge(old, new, removed, out)]


class Sweeper(NamedTuple):
    """How changes get to disk. For another thread: it reads nothing that others change."""

    form: RecordFormat
    target_rows: int  # of a base; one of more than twice as many is divided
    filters: int  # bytes that filters of all files may take
    new_path: Callable[[], Path]

    def fits(self, part: Range, rows: int, filters: int) -> bool:
        """Whether so many changed rows may be one more delta. `filters`: bytes that all of them take now."""
        return (
            len(part.files) in range(1, MOST_DELTAS + 1)
            and part.rows - part.files[0].rows + rows <= part.files[0].rows
            and filters + filter_bytes(rows) <= self.filters
        )

    def write_delta(self, part: Range, records: np.ndarray, removed: np.ndarray, filters: int, new: int) -> list[Range]:
        """As `write_base`; none may be removed, and it must fit. `new`: records that are in no file yet."""
        records, _ = _sorted(records, removed)
        place, ends = len(part.files), (part.low, part.high)
        made = write_segment(self.new_path(), *ends, self.form, [records], filtered=True, place=place, new=new)
        return [part._replace(files=(*part.files, made))]

    def write_base(self, part: Range, records: np.ndarray, removed: np.ndarray, filters: int, new: int) -> list[Range]:
        """What is in the place of `part` after changes: `records` (n, size), distinct, of any order. One base, or
        several where it would be too large; `new` does not matter. OSError: nothing new is left. Memory: that of
        `contents`.
        """
        records, removed = _sorted(records, removed)
        most = part.rows + len(records)
        count = 1 if most <= 2 * self.target_rows else min(-(-most // self.target_rows), part.high - part.low + 1)
        # that of a base leaves room for those of deltas
        filtered = filters + filter_bytes(most) <= self.filters // 2
        ranges: list[Range] = []
        try:
            for low, high in split(part.low, part.high, count):
                first = kernels.first_at_least(records, np.uint64(low))
                last = first + len(within(records[first:], low, high))
                batches = contents(part.files, low, high, records[first:last], removed[first:last])
                made = write_segment(self.new_path(), low, high, self.form, batches, filtered=filtered)
                ranges.append(Range(low, high, (made,) if made.rows else ()))
        except BaseException:
            for file in [file for each in ranges for file in each.files]:
                with suppress(OSError):
                    os.unlink(file.path)
            raise
        return ranges


def _sorted(records: np.ndarray, removed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hashed = np.empty(len(records), np.uint64)
    kernels.hashes_of(records, hashed)
    order = np.argsort(hashed)
    return records[order], removed[order]
