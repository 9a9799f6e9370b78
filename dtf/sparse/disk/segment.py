"""An immutable file of records of one range of hash(id), by ascending hash.

A safetensors file of two tensors. `pages`: pages of records with a checksum each, at multiples of their size. `end`:
the first hash of each page, perhaps a filter of the hashes, and a tail that says what the file holds. Written under a
temporary name, made durable, renamed. In memory a segment takes 8 bytes a page, and its filter.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from dtf.checkpoint import storage
from dtf.checkpoint.manifest import StoredFile
from dtf.checkpoint.safetensors_format import header
from dtf.core.errors import ConfigError, DataError
from dtf.sparse.disk import page_kernels as kernels
from dtf.sparse.disk.record_format import LAYOUT_BYTES, PAGE_BYTES, RecordFormat
from dtf.sparse.row_index import reserve

LAST = 2**64 - 1
"""The largest hash."""

MOST_FILES = 1 << 16
"""That tables of a process have open: up to nine for 128 MB of rows."""

BATCH_BYTES = 1 << 18
"""Bytes that are read, merged or written at a time; a sweep holds a few of these for each delta."""

PAGES, _END = "pages", "end"
_MAGIC = b"dtfrows1"
_TAIL = struct.Struct(f"<8s{LAYOUT_BYTES}s7QI")
"""Format, layout; rows, low, high, seed of checksums, words of the filter, place, new rows; crc32 of all that follows
pages.
"""


class Segment:
    """The records with hashes in [low, high]. Without rows there is no file."""

    def __init__(self, low: int, high: int, form: RecordFormat, cached: bool = False) -> None:
        """`cached`: what is read stays in the page cache, for those who have no cache of their own."""
        self.low, self.high, self.form, self.cached = low, high, form, cached
        self.rows, self.seed, self.file = 0, 0, -1
        self.path, self.stored = Path(), StoredFile(0, ())
        self.firsts = np.empty(0, np.uint64)  # (pages,) the first hash of each
        self.filter = np.empty(0, np.uint64)  # empty: there is none
        self.place = self.new = 0  # among the files of its range, from the oldest on; rows that are not in older ones
        self.direct = False  # whether reads pass by the page cache
        self.about = (0,) * 7  # a row of the table of `page_kernels.plan`; its addresses hold as long as this object

    def open(self, path: Path, stored: StoredFile) -> Segment:
        """Take what the file says of itself, its range too. DataError that names it where it is not what it should be,
        or its end is damaged; a damaged page is found when it is read.
        """
        self.path, self.stored = path, stored
        self.direct, self.file = True, -1
        try:
            if self.cached or self.form.page_bytes % PAGE_BYTES:
                raise OSError(errno.EINVAL, "")
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct, self.file = False, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self.file)
        if self.cached:
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)  # a page that is asked for brings no others along
        self._read_tail()
        self.drop_cache()
        return self

    def _read_tail(self) -> None:
        plain = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            magic, layout, rows, low, high, seed, words, place, new, digest = _tail(self.path, plain, self.stored)
            size = self.stored.size
            start = self.form.head_bytes + self.form.pages(rows) * self.form.page_bytes
            end = os.pread(plain, size - start, start) if start < size else b""
        finally:
            os.close(plain)
        if magic != _MAGIC or layout != self.form.layout():
            raise DataError(f"{self.path}: holds no rows of this table's format")
        pages = self.form.pages(rows)
        if len(end) != 8 * (pages + words) + _TAIL.size or crc32(end[:-4]) != digest:
            raise DataError(f"{self.path}: its end is damaged")
        self.low, self.high, self.rows, self.seed, self.place, self.new = low, high, rows, seed, place, new
        self.firsts = np.frombuffer(end, np.uint64, pages).copy()
        self._take_filter(np.frombuffer(end, np.uint64, words, 8 * pages).copy())

    def _take_filter(self, some: np.ndarray) -> None:
        self.filter, firsts, seed = some, self.firsts, int(np.uint64(self.seed).view(np.int64))
        self.about = (self.file, seed, self.rows, firsts.ctypes.data, len(firsts), some.ctypes.data, len(some))

    def make_filter(self) -> None:
        """Where the file has none. Reads all of it; errors of `damage`."""
        some = np.zeros(filter_bytes(self.rows) // 8, np.uint64)
        for records in self.chunks(0, LAST):
            hashed = np.empty(len(records), np.uint64)
            kernels.hashes_of(records, hashed)
            kernels.fill_filter(hashed, some)
        self._take_filter(some)

    def drop_cache(self) -> None:
        """Leave nothing of the file in the page cache, unless it is `cached`."""
        if not self.cached:
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def damage(self, page: int, outcome: int = kernels.DAMAGED) -> Exception:
        """Why a page could not be read."""
        if outcome == kernels.UNREADABLE:
            plain = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.pread(plain, self.form.page_bytes, self.form.head_bytes + page * self.form.page_bytes)
            except OSError as error:
                return OSError(error.errno, error.strerror, str(self.path))
            finally:
                os.close(plain)
        return DataError(f"{self.path}: page {page} is damaged or cannot be read")

    def chunks(self, low: int, high: int) -> Iterator[np.ndarray]:
        """Records (n, size) with hashes in [low, high], in order, read one after another. Each is valid until the next.
        Errors of `damage`.
        """
        first = max(0, int(np.searchsorted(self.firsts, np.uint64(low), "right")) - 1)
        last = int(np.searchsorted(self.firsts, np.uint64(high), "right"))
        form, most = self.form, max(1, BATCH_BYTES // self.form.page_bytes)
        pages = reserve(most, form.page_bytes // 8, np.dtype(np.uint64))
        records = np.empty((most * form.per_page, form.size), np.uint8)
        for page in range(first, last, most):
            some = pages[: min(most, last - page)]
            got = kernels.fill(self.file, some.ctypes.data, some.nbytes, form.head_bytes + page * form.page_bytes)
            if got < some.nbytes:
                raise self.damage(page + got // form.page_bytes, kernels.UNREADABLE)
            damaged = kernels.unseal(some, page, self.rows, form.size, np.uint64(self.seed), records)
            if damaged >= 0:
                raise self.damage(damaged)
            here = records[: min(len(some) * form.per_page, self.rows - page * form.per_page)]
            yield within(here, low, high)
        if not self.direct and last > first:
            self.drop_cache()


def _tail(path: Path, file: int, stored: StoredFile) -> tuple[Any, ...]:
    size = os.fstat(file).st_size
    if size != stored.size or size < _TAIL.size:
        raise DataError(f"{path}: has {size} bytes instead of {stored.size}")
    return _TAIL.unpack(os.pread(file, _TAIL.size, size - _TAIL.size).ljust(_TAIL.size, b"\0"))


def layout_of(path: Path, stored: StoredFile) -> RecordFormat:
    """How the records of a segment are kept. DataError where it is none."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        magic, layout, *_ = _tail(path, file, stored)
        if magic != _MAGIC:
            raise ValueError("no rows")
        return RecordFormat.of_layout(layout)
    except (ValueError, ConfigError) as error:
        raise DataError(f"{path}: holds no rows of a table: {error}") from None
    finally:
        os.close(file)


def within(records: np.ndarray, low: int, high: int) -> np.ndarray:
    """Those of sorted records whose hash is in [low, high]."""
    stop = len(records) if high == LAST else kernels.first_at_least(records, np.uint64(high + 1))
    return records[kernels.first_at_least(records, np.uint64(low)) : stop]


def filter_bytes(rows: int) -> int:
    """Of the filter of so many rows."""
    return 8 * -(-rows * kernels.FILTER_BITS // 64)


def write_segment(
    path: Path,
    low: int,
    high: int,
    form: RecordFormat,
    batches: Iterable[np.ndarray],
    filtered: bool = False,
    place: int = 0,
    new: int = 0,
) -> Segment:
    """Write records (n, size) by ascending hash, batch by batch, durably. OSError: nothing of it is left. `filtered`:
    with a filter. `place`, `new`: see `Segment`; the oldest has all rows new.
    """
    made = Segment(low, high, form)
    made.place, made.new = place, new
    draft = path.with_name(f"{path.name}.tmp")
    try:
        stored = storage.write(draft, _pieces(made, batches, filtered), (form.head_bytes, lambda: _head(made)))
        if not made.rows:
            os.unlink(draft)
            return made
        os.rename(draft, path)
        return made.open(path, stored)
    except BaseException:
        for each in (draft, path):
            with suppress(OSError):
                os.unlink(each)
        raise


def _head(made: Segment) -> bytes:
    form, pages = made.form, made.form.pages(made.rows)
    end = 8 * pages + made.filter.nbytes + _TAIL.size
    tensors = ((PAGES, "U8", (pages, form.page_bytes)), (_END, "U8", (end,)))
    return header(tensors, form.head_bytes)


def _pieces(made: Segment, batches: Iterable[np.ndarray], filtered: bool) -> Iterator[memoryview]:
    form, made.seed = made.form, secrets.randbits(64)
    firsts, hashed = list[np.ndarray](), list[np.ndarray]()
    page, rest = 0, np.empty((0, form.size), np.uint8)
    for batch in batches:
        if filtered:
            hashed.append(np.empty(len(batch), np.uint64))
            kernels.hashes_of(batch, hashed[-1])
        records = np.concatenate([rest, batch]) if len(rest) else batch
        whole = len(records) // form.per_page
        if whole:
            yield _sealed(records[: whole * form.per_page], page, made, firsts)
        page += whole
        rest = records[whole * form.per_page :].copy()
        made.rows += len(batch)
    if len(rest):
        yield _sealed(rest, page, made, firsts)
    made.filter = np.zeros(filter_bytes(made.rows) // 8 if filtered else 0, np.uint64)
    for each in hashed:
        kernels.fill_filter(each, made.filter)
    end = b"".join(each.tobytes() for each in [*firsts, made.filter])
    what = (
        made.rows,
        made.low,
        made.high,
        made.seed,
        len(made.filter),
        made.place,
        made.new if made.place else made.rows,
    )
    end += _TAIL.pack(_MAGIC, form.layout(), *what, 0)[:-4]
    yield memoryview(end + struct.pack("<I", crc32(end)))


def _sealed(records: np.ndarray, page: int, made: Segment, firsts: list[np.ndarray]) -> memoryview:
    count = made.form.pages(len(records))
    pages, first = np.zeros((count, made.form.page_bytes // 8), np.uint64), np.empty(count, np.uint64)
    kernels.seal(np.ascontiguousarray(records), page, np.uint64(made.seed), pages, first)
    firsts.append(first)
    return pages.data.cast("B")
