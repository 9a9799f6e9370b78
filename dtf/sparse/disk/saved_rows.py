"""Saves and loads of tables on disk. A save links the segments as they are, and writes the rows that no segment holds
yet; what it holds never changes afterwards.

Committed by one rename, so that a kill at any moment leaves a whole save or none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dtf.checkpoint import storage
from dtf.checkpoint.blocks import Blocks
from dtf.checkpoint.durable_renames import sync_folder
from dtf.checkpoint.manifest import BLOCK_BYTES, MAX_BYTES, StoredFile, exact_json, parse_json
from dtf.core.errors import DataError, io_failure
from dtf.sparse.disk.cache_kernels import ABSENT, DIRTY, WRITING
from dtf.sparse.disk.partitioned_run import PartitionedRun
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.row_cache import decoded
from dtf.sparse.disk.segment import LAST, Segment, write_segment
from dtf.sparse.disk.tiered_records import ENDING, TieredRecords

MANIFEST = "rows.json"
CHANGED, REMOVED = f"changed{ENDING}", f"removed{ENDING}"
_FORMAT = 1
_IDS = RecordFormat(0, 0)  # of REMOVED: ids alone
_SLICE = 1 << 20  # dirty rows that are sorted at a time, about


def save(table: TieredRecords, folder: Path) -> None:
    """Save all rows to a new folder. The table is as before. SaveError where the disk is full or fails: nothing of the
    folder is there.
    """
    draft = folder.with_name(f"{folder.name}.tmp")
    try:
        if os.path.lexists(draft):
            shutil.rmtree(draft)
        draft.mkdir(mode=0o700)
        segments = [segment for segment in table.run.segments if segment.rows]
        for segment in segments:
            storage.link(segment.path, draft / segment.path.name, segment.stored)
        extra = [
            write_segment(draft / CHANGED, 0, LAST, table.form, _dirty(table, False)),
            write_segment(draft / REMOVED, 0, LAST, _IDS, _dirty(table, True)),
        ]
        body = exact_json(
            {
                "format": _FORMAT,
                "layout": table.form.layout().hex(),
                "rows": table.rows,
                "bounds": [segment.low for segment in table.run.segments],
                "segments": [_entry(segment) for segment in segments],
                "changes": [_entry(segment) if segment.rows else None for segment in extra],
            }
        )
        storage.write(draft / MANIFEST, [body, _seal(body)])
        sync_folder(draft)
        os.rename(draft, folder)
        sync_folder(folder.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise io_failure(error, folder) or error from error
        raise


def _dirty(table: TieredRecords, removed: bool) -> Iterator[np.ndarray]:
    """Records of the rows that differ from those in segments, by ascending hash; of removed ones the ids alone."""
    slices = -(-table.cache.capacity // _SLICE)
    for index in range(slices):
        low, high = (LAST + 1) * index // slices, (LAST + 1) * (index + 1) // slices - 1
        positions = table.cache.flagged(DIRTY | WRITING, low, high, table.cache.capacity)
        positions = positions[(table.cache.flags[positions] & ABSENT != 0) == removed]
        for at in range(0, len(positions), BLOCK_BYTES // table.form.size):
            some = positions[at : at + BLOCK_BYTES // table.form.size]
            if removed:
                yield table.cache.ids[some].view(np.uint8).reshape(len(some), 8)
            else:
                yield table.cache.encode(some)


def _entry(segment: Segment) -> list[Any]:
    return [segment.path.name, segment.low, segment.stored.size, list(segment.stored.crc32)]


def _seal(body: bytes) -> bytes:
    return b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def load(table: TieredRecords, folder: Path, verify: bool = True) -> None:
    """Fill an empty table with what was saved. `verify`: compare the digests of all files first; else a damaged page is
    found when it is read.

    DataError that names what is damaged or of another format. Errors of TieredRecords; the table is not whole then.
    """
    data = _manifest(folder)
    if data["layout"] != table.form.layout().hex():
        raise DataError(f"{folder}: rows of another width, state or number format than those of the table")
    entries = {name: (low, StoredFile(size, tuple(crc))) for name, low, size, crc in data["segments"]}
    changes = [entry and (entry[0], StoredFile(entry[2], tuple(entry[3]))) for entry in data["changes"]]
    files = {name: stored for name, (_, stored) in entries.items()} | dict(each for each in changes if each)
    for name, stored in files.items() if verify else ():
        blocks = Blocks(folder, name, stored)
        for number in sorted(blocks.damaged(range(len(stored.crc32)))):
            raise DataError(f"{folder}/{blocks.damage(number, number + 1)}")
    try:
        most = max(1, table.cache.capacity // 4)  # the memory may be smaller than it was
        table.run = _linked_run(table, folder, data["bounds"], entries)
        for each, form, whole in zip(changes, (table.form, _IDS), (True, False), strict=True):
            if each:
                for batch in Segment(0, LAST, form).open(folder / each[0], each[1]).chunks(0, LAST):
                    ids = decoded(batch, form)[0]
                    for at in range(0, len(ids), most):
                        table.put_dirty(ids[at : at + most], batch[at : at + most] if whole else None)
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing") from None
    except OSError as error:
        raise io_failure(error, folder) or error from error
    table.rows = data["rows"]


def _linked_run(
    table: TieredRecords, folder: Path, bounds: list[int], entries: dict[str, tuple[int, StoredFile]]
) -> PartitionedRun:
    run = PartitionedRun(table.form, 1)
    highs = [low - 1 for low in bounds[1:]] + [LAST]
    made = {low: Segment(low, high, table.form) for low, high in zip(bounds, highs, strict=True)}
    for name, (low, stored) in entries.items():
        path = table.new_path()
        storage.link(folder / name, path, stored)
        made[low].open(path, stored)
    run.replace(run.segments[0], list(made.values()))
    return run


def _manifest(folder: Path) -> dict[str, Any]:
    """DataError where it is missing or a byte of it differs."""
    path = folder / MANIFEST
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; the rows were not saved whole") from None
    body = content[: -len(_seal(b""))]
    if content[len(body) :] != _seal(body):
        raise DataError(f"{path} is damaged: its bytes do not have the SHA-256 at its end")
    data = parse_json(body)
    if data["format"] != _FORMAT:
        raise DataError(f"{path} has format {data['format']}, this version of dtf reads format {_FORMAT}")
    return data
