"""Segments that together cover all hashes: reads by id from many threads, and sweeps that replace a segment by what it
and changed rows make.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from dtf.core.errors import DataError
from dtf.sparse.disk import page_kernels as kernels
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.segment import Segment, within, write_segment
from dtf.sparse.row_index import reserve


class PartitionedRun:
    """All records on disk with hashes in [low, high]. `segments`: by ascending hash, without gaps. Its methods are for
    one thread; what they read and write goes on in others. Memory: 8 bytes a page.
    """

    def __init__(
        self, form: RecordFormat, low: int, high: int, ranges: int = 1, segments: Sequence[Segment] = ()
    ) -> None:
        """With `segments` that lie in it; with none, so many empty `ranges`. DataError where two overlap."""
        self.form, self.low, self.high = form, low, high
        self.segments, at = [], low
        for segment in sorted(segments, key=lambda segment: segment.low):
            if segment.low < at:
                raise DataError(f"{segment.path}: holds hashes that another file holds")
            if segment.low > at:
                self.segments.append(Segment(at, segment.low - 1, form))
            self.segments.append(segment)
            at = segment.high + 1
        if at <= high:
            self.segments += [Segment(*ends, form) for ends in split(at, high, 1 if segments else ranges)]
        self._settle()

    def _settle(self) -> None:
        self.lows = np.array([segment.low for segment in self.segments], np.uint64)

    @property
    def past_cache(self) -> bool:
        """Whether all reads pass by the page cache; else what was read is dropped from it."""
        return all(segment.direct for segment in self.segments if segment.rows)

    def at(self, hashed: int) -> Segment:
        """The segment of a hash."""
        return self.segments[int(np.searchsorted(self.lows, np.uint64(hashed), "right")) - 1]

    def replace(self, old: Segment, new: list[Segment]) -> None:
        """`new` cover the range of `old`, whose file goes; reads that have begun end as they would have."""
        place = self.segments.index(old)
        self.segments[place : place + 1] = new
        self._settle()
        if old.rows:
            with suppress(FileNotFoundError):
                os.unlink(old.path)

    def read(self, ids: np.ndarray, threads: ThreadPoolExecutor, depth: int) -> Reading:
        """Begin to read the records of distinct ids (n,), with `depth` reads at a time."""
        return Reading(self, ids, threads, depth)


class Reading:
    """Records that are on their way."""

    def __init__(self, run: PartitionedRun, ids: np.ndarray, threads: ThreadPoolExecutor, depth: int) -> None:
        form, count = run.form, len(ids)
        self.ids = ids
        self.records = np.empty((count, form.size), np.uint8)
        self.found = np.zeros(count, np.uint8)
        hashed = np.empty(count, np.uint64)
        kernels.hashes(ids, hashed)
        order = np.argsort(hashed)
        hashed, by_hash = hashed[order], ids[order]
        bounds = [*np.searchsorted(hashed, run.lows).tolist(), count]
        jobs, pages = np.empty((count, 4), np.int64), 0
        self._segments: list[Segment] = []  # held, so that their files stay open
        for segment, (begin, end) in zip(run.segments, pairwise(bounds), strict=True):
            if segment.rows and end > begin:
                pages = kernels.plan(segment.firsts, hashed, begin, end, len(self._segments), jobs, pages)
                self._segments.append(segment)
        self._jobs = jobs[:pages]
        depth = min(depth, pages)
        table = np.array([(s.file, np.uint64(s.seed).view(np.int64), s.rows) for s in self._segments], np.int64)
        buffers = reserve(depth, form.page_bytes // 8, np.dtype(np.uint64))
        self._parts: list[Future] = [
            threads.submit(
                kernels.read_jobs, self._jobs, first, depth, table, form.head_bytes, by_hash, hashed, order, form.size,
                buffers[first], self.records, self.found,
            )
            for first in range(depth)
        ]  # fmt: skip

    @property
    def pages(self) -> int:
        """How many pages are read."""
        return len(self._jobs)

    def wait(self) -> None:
        """Until `records` of the ids that are `found` are there. DataError or OSError names the file and why."""
        ended = [part.result() for part in self._parts]
        for outcome, job in ended:
            if outcome != kernels.WHOLE:
                raise self._segments[self._jobs[job, 0]].damage(int(self._jobs[job, 1]), outcome)
        for segment in self._segments:
            if not segment.direct:
                segment.drop_cache()
        self._segments = []


def split(low: int, high: int, count: int) -> list[tuple[int, int]]:
    """[low, high] in `count` ranges of about the same size."""
    lows = [low + (high - low + 1) * index // count for index in range(count + 1)]
    return [(first, after - 1) for first, after in pairwise(lows)]


def merged(segment: Segment, low: int, high: int, records: np.ndarray, removed: np.ndarray) -> Iterator[np.ndarray]:
    """Records (n, size) of a segment with hashes in [low, high] after changes: sorted `records` are in place of those
    of the same ids, and `removed` (bool, for each of them) are not there. Valid until the next.
    """
    done = 0
    for old in segment.chunks(low, high):
        if not len(old):
            continue
        last = np.empty(1, np.uint64)
        kernels.hashes(old[-1:, :8].copy().view(np.int64).reshape(-1), last)
        upto = done + len(within(records[done:], 0, int(last[0])))
        yield _merged(old, records[done:upto], removed[done:upto])
        done = upto
    if done < len(records):
        yield _merged(np.empty((0, segment.form.size), np.uint8), records[done:], removed[done:])


def _merged(old: np.ndarray, new: np.ndarray, removed: np.ndarray) -> np.ndarray:
    out = np.empty((len(old) + len(new), old.shape[1]), np.uint8)
    return out[: kernels.merge(old, new, removed, out)]


def rewrite(
    segment: Segment, records: np.ndarray, removed: np.ndarray, target_rows: int, new_path: Callable[[], Path]
) -> list[Segment]:
    """Segments for the range of `segment` with the changes of `merged`; several where it would have more than twice
    `target_rows`. OSError: nothing new is left. Bounded memory.
    """
    most = segment.rows + len(records)
    count = 1 if most <= 2 * target_rows or segment.high == segment.low else -(-most // target_rows)
    made: list[Segment] = []
    try:
        for low, high in split(segment.low, segment.high, min(count, segment.high - segment.low + 1)):
            first = kernels.first_at_least(records, np.uint64(low))
            last = first + len(within(records[first:], low, high))
            batches = merged(segment, low, high, records[first:last], removed[first:last])
            made.append(write_segment(new_path(), low, high, segment.form, batches))
    except BaseException:
        for each in made:
            with suppress(OSError):
                if each.rows:
                    os.unlink(each.path)
        raise
    return made
