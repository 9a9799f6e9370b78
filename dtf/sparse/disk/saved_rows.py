"""Tables on disk in checkpoints. A save links the segments as they are, and writes the rows that no segment holds yet.

A checkpoint holds a table in parts, one of each process that wrote it: `table/NAME/disk_K/segments`, and
`changed` and `removed`, which are newer. Each is the pages of segment files, see `dtf.sparse.disk.segment`; `removed`
holds ids alone. `table/NAME/columns/KEY` are the first column of a state, or of the `rows`, in a record, and the one
after the last; `table/NAME/bytes/KEY` are the first byte of what is kept beside these, and the one after the last.
"""

from __future__ import annotations

import itertools
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtf.checkpoint import storage
from dtf.checkpoint.manifest import BLOCK_BYTES, Manifest, StoredFile
from dtf.core.errors import DataError, SaveError, io_failure
from dtf.sparse.disk.cache_kernels import ABSENT
from dtf.sparse.disk.page_kernels import hashes
from dtf.sparse.disk.partitioned_run import PartitionedRun, Range, contents
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.row_cache import by_hash, decoded
from dtf.sparse.disk.segment import LAST, PAGES, Segment, layout_of, write_segment
from dtf.sparse.disk.tiered_records import ENDING, TieredRecords

SEGMENTS, CHANGED, REMOVED = "segments", "changed", "removed"
"""The tensors of a part."""

_IDS = RecordFormat(0, 0)  # of REMOVED
_NUMBERS = itertools.count()
_PART = re.compile(rf"disk_\d+/({SEGMENTS}|{CHANGED}|{REMOVED})")

Files = list[tuple[Path, StoredFile]]


class Part(NamedTuple):
    """The files of one part, by the name of their tensor."""

    segments: Files
    changed: Files
    removed: Files


def parts_in(folder: Path, names: set[str], prefix: str) -> list[Part]:
    """The parts of a table in a checkpoint with tensors of such `names`, of which those of the table begin with
    `prefix`. Empty: its rows are not kept so. DataError where the checkpoint is not complete.
    """
    found = _in_parts(names, prefix)
    return parts_of(folder, storage.read_manifest(folder), prefix) if found else []


def _in_parts(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix) and _PART.fullmatch(name.removeprefix(prefix))]


def parts_of(folder: Path, manifest: Manifest, prefix: str) -> list[Part]:
    """As `parts_in`, by a manifest that was read."""
    parts = dict[str, dict[str, Files]]()
    for name in _in_parts(manifest.tensors, prefix):
        part, kind = name.removeprefix(prefix).split("/")
        boxes = sorted(manifest.tensors[name].boxes, key=lambda box: box.offset)
        parts.setdefault(part, {})[kind] = [(folder / box.file, manifest.files[box.file]) for box in boxes]
    return [Part(*(parts[part].get(kind, []) for kind in Part._fields)) for part in sorted(parts)]


# ---------------------------------------------------------------- saving


class RowsSetAside:
    """All rows of a table as they were, in files of a folder of its own, until `write` has put them elsewhere."""

    def __init__(self, table: TieredRecords) -> None:
        """Links the segments, writes what is newer. The table is as before. OSError where the disk is full or fails:
        nothing of the folder is there.
        """
        self._folder = table.folder / f"{next(_NUMBERS)}_set_aside"
        weakref.finalize(self, shutil.rmtree, self._folder, True)  # where a save fails before `write`
        with suppress(SaveError):  # its rows are newer than any file then
            table.finish_sweep()
        try:
            self._folder.mkdir(mode=0o700)
            self._kinds: dict[str, list[Segment]] = {SEGMENTS: list(table.run.files)}
            for segment in self._kinds[SEGMENTS]:
                storage.link(segment.path, self._folder / segment.path.name, segment.stored)
            for kind, form in ((CHANGED, table.form), (REMOVED, _IDS)):
                batches = _dirty(table, kind == REMOVED)
                made = write_segment(self._folder / f"{kind}{ENDING}", 0, LAST, form, batches)
                self._kinds[kind] = [made] if made.rows else []
        except BaseException:
            self.forget()
            raise

    def write(self, folder: Path, prefix: str, part: str) -> list[dict[str, Any]]:
        """Put the files into the folder of a checkpoint under names that begin with `prefix`, as tensors whose names
        begin with `part`. Returns what was written, as `boxes.write_boxes` does. OSError where that fails.
        """
        told = []
        for kind, segments in self._kinds.items():
            pages = sum(segment.form.pages(segment.rows) for segment in segments)
            before = 0
            for segment in segments:
                name, form = f"{prefix}.{segment.path.name}", segment.form
                count = form.pages(segment.rows)
                storage.link(self._folder / segment.path.name, folder / name, segment.stored)
                shapes = (pages, form.page_bytes), PAGES, (before, 0), (count, form.page_bytes)
                stored = {"size": segment.stored.size, "crc32": list(segment.stored.crc32)}
                told.append({"file": name, **stored, "boxes": [[f"{part}/{kind}", "U8", *shapes]]})
                before += count
        self.forget()
        return told

    def forget(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _dirty(table: TieredRecords, removed: bool) -> Iterator[np.ndarray]:
    """Records of the rows that differ from those in segments, by ascending hash; of removed ones the ids alone. No
    sweep goes on.
    """
    cache, most = table.cache, BLOCK_BYTES // table.form.size
    for part in table.run.ranges:
        positions = by_hash(cache.ids, cache.dirty_in(part.low, part.high))
        positions = positions[(cache.flags[positions] & ABSENT != 0) == removed]
        for some in (positions[at : at + most] for at in range(0, len(positions), most)):
            yield cache.ids[some].view(np.uint8).reshape(len(some), 8) if removed else cache.encode(some)


# ---------------------------------------------------------------- loading


def same_layout(parts: list[Part], form: RecordFormat) -> bool:
    """Whether records are kept as `form` says. DataError for a file that holds none."""
    return all(layout_of(*file) == form for part in parts for file in (*part.segments, *part.changed))


def load(table: TieredRecords, parts: list[Part]) -> None:
    """Fill an empty table with its range of what was saved, in the same format. The files were compared with their
    digests before, or a damaged page is found when it is read.

    DataError that names what is damaged. Errors of TieredRecords; the table is not whole then.
    """
    low, high = table.run.low, table.run.high
    if low > high:  # there are fewer shards than owners
        return
    try:
        there = [opened(table.form, *file) for part in parts for file in part.segments]
        ranges = [each for each in PartitionedRun(table.form, 0, LAST, files=there).ranges if each.files]
        mine = [file for each in ranges if each.low <= high and each.high >= low for file in _linked(table, each)]
        table.run = PartitionedRun(table.form, low, high, table.least_ranges, mine)
        table.rows = sum(file.new for file in mine)
        most = max(1, table.cache.capacity // 4)  # the memory may be smaller than it was
        for part in parts:
            for file in part.changed:
                for batch in opened(table.form, *file).chunks(low, high):
                    for some in (batch[at : at + most] for at in range(0, len(batch), most)):
                        table.replace(ids_of(some), some)
            for file in part.removed:
                for batch in opened(_IDS, *file).chunks(low, high):
                    for some in (batch[at : at + most] for at in range(0, len(batch), most)):
                        ids = ids_of(some)
                        table.remove(ids[table.place(ids, 0) >= 0])
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing") from None
    except OSError as error:
        raise io_failure(error, table.folder) or error from error


def _linked(table: TieredRecords, part: Range) -> list[Segment]:
    """What stored files hold of the range of a table, in files of the table's own."""
    low, high, form = table.run.low, table.run.high, table.form
    if low <= part.low and part.high <= high:
        own = []
        for file in part.files:
            path = table.new_path()
            storage.link(file.path, path, file.stored)
            own.append(opened(form, path, file.stored))
        return own
    low, high = max(low, part.low), min(high, part.high)
    batches = contents(part.files, low, high, np.empty((0, form.size), np.uint8), np.empty(0, np.bool_))
    made = write_segment(table.new_path(), low, high, form, batches)
    return [made] if made.rows else []


def opened(form: RecordFormat, path: Path, stored: StoredFile) -> Segment:
    """A stored segment."""
    return Segment(0, LAST, form).open(path, stored)


def rows_of(part: Part) -> Iterator[tuple[RecordFormat, np.ndarray, np.ndarray, np.ndarray]]:
    """All rows of a part, some at a time, as copies: how they are kept, ids (n,), rows with their states, extra.

    DataError for a damaged file.
    """
    files = part.segments or part.changed
    if not files:
        return
    form = layout_of(*files[0])
    segments = [opened(form, *file) for file in part.segments]
    changed = [opened(form, *file) for file in part.changed]
    removed = [opened(_IDS, *file) for file in part.removed]
    for low, high, held in PartitionedRun(form, 0, LAST, files=segments).ranges:
        for batch in contents(held, low, high, *_newer(form, changed, removed, low, high)):
            yield (form, *decoded(batch, form))


def removed_ids(parts: list[Part]) -> np.ndarray:
    """Ascending ids (n,) of rows that are in segments, and in the table no more. DataError for a damaged file."""
    files = [opened(_IDS, *file) for part in parts for file in part.removed]
    batches = [ids_of(batch) for file in files for batch in file.chunks(0, LAST)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *batches]))


def tensors_of(parts: list[Part], columns: Mapping[str, tuple[int, int]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All rows by ascending id, as a checkpoint of a table in memory has them: `ids` (n,), `rows` (n, width), states;
    and what is kept beside them, (n, bytes).
    """
    batches = [batch[1:] for part in parts for batch in rows_of(part)]
    if not batches:
        return {}, np.empty((0, 0), np.uint8)
    ids, records, extra = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    order = np.argsort(ids)
    found = {"ids": ids[order]}
    for key, (first, last) in columns.items():
        found[key] = records[order, first:last] if key == "rows" or last - first > 1 else records[order, first]
    return found, extra[order]


def _newer(
    form: RecordFormat, changed: list[Segment], removed: list[Segment], low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """Records (n, size) that are newer than those of a range, by ascending hash, and which of them are removed."""
    parts = [batch.copy() for segment in changed for batch in segment.chunks(low, high)]
    kept = sum(map(len, parts))
    for ids in (ids for segment in removed for ids in segment.chunks(low, high)):
        batch = np.zeros((len(ids), form.size), np.uint8)
        batch[:, :8] = ids
        parts.append(batch)
    records = np.concatenate([np.empty((0, form.size), np.uint8), *parts])
    gone = np.arange(len(records)) >= kept
    order = _by_hash(records)
    return records[order], gone[order]


def _by_hash(records: np.ndarray) -> np.ndarray:
    hashed = np.empty(len(records), np.uint64)
    hashes(ids_of(records), hashed)
    return np.argsort(hashed)


def ids_of(records: np.ndarray) -> np.ndarray:
    """Ids (n,) of records (n, size)."""
    return records[:, :8].copy().view(np.int64).reshape(-1)
