"""The rows of a table that lay on disk, where they are looked up in the files of a checkpoint. Numpy and numba, no
torch, no ranks.

Pages are read that may hold what is asked for, and no others. They stay in the page cache, for which the host has as
much memory as nobody else takes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dtf.checkpoint.blocks import Blocks
from dtf.checkpoint.manifest import StoredFile
from dtf.core.errors import DataError
from dtf.host.devices import allow_files
from dtf.sparse.disk.partitioned_run import PartitionedRun
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.row_cache import decoded
from dtf.sparse.disk.saved_rows import Part, removed_ids
from dtf.sparse.disk.segment import LAST, MOST_FILES, Segment, layout_of
from dtf.sparse.disk.tiered_records import DEPTH, reading_threads
from dtf.sparse.row_parts import DECAYED, extra_of

Open = Mapping[StoredFile, Segment]
"""Segments that are open: those of the same content are the same."""

_PAGES_A_THREAD = 8  # a read from the page cache is over before a thread begins


class FileLayer:
    """Rows of some files of a table by id. For any number of threads. `removed`: ascending ids (n,) that are in none of
    the older files any more.

    Memory: 8 bytes a page, the filters, 8 bytes for a removed id.
    """

    def __init__(
        self, form: RecordFormat, columns: slice, since: slice | None, files: list[Segment], removed: np.ndarray
    ) -> None:
        self.removed, self.dtype, self._form, self._columns, self._since = removed, form.dtype, form, columns, since
        self._run = PartitionedRun(form, 0, LAST, files=files)

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some ascending ids (n,) have a row here, bool (n,), and the records of these. DataError where a page
        is damaged or cannot be read.
        """
        first = np.append(True, ids[1:] != ids[:-1])[: len(ids)]
        depth = min(DEPTH, 1 + len(ids) // _PAGES_A_THREAD)
        reading = self._run.read(ids[first], reading_threads(DEPTH, os.getpid()), depth)
        try:
            reading.wait()
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}") from error
        at = np.cumsum(first) - 1
        has = reading.found[at] != 0
        return has, reading.records[at[has]]

    def read(self, records: np.ndarray, decay: float, out: np.ndarray) -> np.ndarray:
        """Fill `out` (n, width) with the rows in some records, as they are when all decay so far is `decay`."""
        _, rows, extra = decoded(records, self._form)
        out[:] = rows[:, self._columns]
        if decay and self._since is not None:
            out *= np.exp(decay - extra_of(DECAYED, extra, self._since))[:, None].astype(out.dtype)
        return out


def layers_of(
    parts: list[Part], columns: slice, since: slice | None, known: Open
) -> tuple[list[FileLayer], dict[StoredFile, Segment]]:
    """The layers of a table in a checkpoint, the newest first, and what they have open; `known` files are not opened
    again. `columns`: of a row in its record. `since`: the bytes beside it that say which decay it had, if it has any.
    No parts, no layers.

    What changed last is read once, for its filter. DataError for a file that is damaged, or is not of this table;
    OSError where one cannot be opened.
    """
    first = next((file for part in parts for file in (*part.segments, *part.changed)), None)
    if first is None:
        return [], {}
    allow_files(MOST_FILES)
    form = layout_of(*first)
    for where, most in ((columns, form.stride), *([(since, form.extra)] if since else [])):
        if not 0 <= where.start < where.stop <= most:
            raise DataError(f"{first[0]}: {where.start} to {where.stop} are no part of the {most} of its records")
    segments = {file[1]: _opened(form, file, known) for part in parts for file in part.segments}
    changed = [_opened(form, file, {}) for part in parts for file in part.changed]
    for place, file in enumerate(changed):
        file.place = place  # they have no ids in common
        file.make_filter()
    newest = FileLayer(form, columns, since, changed, removed_ids(parts))
    return [newest, FileLayer(form, columns, since, list(segments.values()), np.empty(0, np.int64))], segments


def _opened(form: RecordFormat, file: tuple[Path, StoredFile], known: Open) -> Segment:
    path, stored = file
    segment = known.get(stored)
    if segment is None:
        last = len(stored.crc32) - 1
        blocks = Blocks(path.parent, path.name, stored)
        if blocks.damaged(range(last, last + 1)):  # it holds what all checksums of pages begin with
            raise DataError(blocks.damage(last, last + 1))
        segment = Segment(0, LAST, form, cached=True).open(path, stored)
    segment.path = path  # the other one may be gone
    return segment
