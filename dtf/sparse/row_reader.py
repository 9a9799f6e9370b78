"""Rows of sparse tables for a server of a model, from the checkpoints of a run that goes on.

Needs no trainer: numpy and the files of checkpoints, no torch; numba for tables that lay on disk.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dtf.api.sparse_table import NO_NUMBA
from dtf.checkpoint import storage
from dtf.checkpoint.manifest import Manifest, StoredFile
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.core.errors import ConfigError, DataError
from dtf.sparse.row_layers import Content, Files, Layer, content, layer_names, look_up

if TYPE_CHECKING:
    from dtf.sparse.disk.row_files import FileLayer
    from dtf.sparse.disk.segment import Segment

_ATTEMPTS = 10
"""How often a checkpoint may be removed while it is opened: each time a newer one came."""


class Version(NamedTuple):
    """The checkpoint that an answer is from: optimizer steps done, and the id of the run that wrote it."""

    step: int
    run_id: str


class Lookup(NamedTuple):
    """An answer. For ids of any shape (...): `rows` (..., width), `found` bool (...)."""

    rows: np.ndarray
    found: np.ndarray
    version: Version


class _Table(NamedTuple):
    layers: Sequence[Layer | FileLayer]  # the newest first
    width: int
    dtype: Any
    decay: float  # all weight decay so far, see `SparseTable.decayed`


class RowSnapshot:
    """The tables of one checkpoint. It stays as it is, and can be read by many threads at once."""

    def __init__(self, manifest: Manifest, tables: dict[str, _Table]) -> None:
        self.manifest, self._tables = manifest, tables
        self.version = Version(manifest.step, manifest.run_id)
        self.widths = {name: table.width for name, table in tables.items()}

    def lookup(self, table: str, ids: Any) -> Lookup:
        """See `RowReader.lookup`."""
        if table not in self._tables:
            raise DataError(f"there is no table {table!a}; there are {', '.join(sorted(self._tables)) or 'none'}")
        layers, width, dtype, decay = self._tables[table]
        if not width:
            raise DataError(f"table {table} of step {self.version.step} has no rows yet, and so no width")
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu" and ids.size:
            raise DataError(f"ids of table {table} are {ids.dtype}, not integers")
        flat = ids.reshape(-1).astype(np.int64, copy=False)
        rows, found = np.zeros((len(flat), width), dtype), np.zeros(len(flat), bool)
        look_up(layers, flat, decay, rows, found)
        return Lookup(rows.reshape(*ids.shape, width), found.reshape(ids.shape), self.version)


class RowReader:
    """Answers with the rows of sparse tables as an evaluation sees them, from a checkpoint or from the newest one of a
    run, also while the run goes on. Not collective; for any number of threads.

    `path`: a run folder, `RUN/best`, or a checkpoint. `mapped`: rows stay in the files of the checkpoint, which are
    mapped; False: they are read into memory, for file systems whose files other hosts can remove while they are read
    (NFS). Of tables that lay on disk, pages are read when their rows are asked for, and nothing is mapped. DataError
    where there is no checkpoint that can be read.
    """

    def __init__(self, path: str | Path, mapped: bool = True) -> None:
        self._path, self._mapped, self._lock = Path(path), mapped, threading.Lock()
        _READERS.add(self)
        self._layers: dict[Content, Layer] = {}
        self._segments: dict[StoredFile, Segment] = {}
        self._now: RowSnapshot | None = None
        self.fault = ""
        """Why the last `refresh` could not take the newest checkpoint; empty where it could."""

        self.refresh()
        if self._now is None:
            raise DataError(self.fault)

    @property
    def snapshot(self) -> RowSnapshot:
        """The tables as they are now, for several lookups of one version. Has `lookup`, `version`, and `widths`: name
        of each table -> numbers in a row.
        """
        assert self._now is not None
        return self._now

    @property
    def version(self) -> Version:
        """Of the checkpoint that answers now."""
        return self.snapshot.version

    def lookup(self, table: str, ids: Any) -> Lookup:
        """The rows of integers `ids` (...) of a table. All of them are of one checkpoint, which `version` names.

        An id without a row has zeros, the mean of new rows, as in an exported model, and is not `found`. DataError for
        a table that there is not, or that has no rows yet, and where a page of one that lay on disk is damaged or
        cannot be read. ConfigError where the host lets no thread start that reads.
        """
        return self.snapshot.lookup(table, ids)

    def refresh(self) -> bool:
        """Go over to the newest checkpoint that can be read. Returns whether it is another one than before.

        Answers are those of the earlier one until all of the new one is there. Reads only layers that it has not read
        yet. Where the run set checkpoints aside, this may be one of an earlier step. `fault` says why a newer one was
        passed over.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                found = self._newest()
                if found is not None:
                    return found
            self.fault = f"{self._path}: each checkpoint was removed while it was opened"
            return False

    def follow(self, seconds: float = 5.0) -> Iterator[Version]:
        """Refresh for ever, so often; gives the version of each checkpoint that was taken."""
        while True:
            if self.refresh():
                yield self.version
            time.sleep(seconds)

    def _newest(self) -> bool | None:
        """As `refresh`; None where a checkpoint was removed while it was opened."""
        now, self.fault = self._now, ""
        try:
            folders = resolve_checkpoints(self._path, "path")
        except (DataError, OSError) as error:
            self.fault = str(error)
            return False
        steps = [storage.step_of(folder.name) for folder in folders]
        # only what is set aside leaves the newest place to an earlier step
        least = now.version.step if now and steps[0] is not None and steps[0] >= now.version.step else 0
        for folder, step in zip(folders, steps, strict=True):
            if step is not None and step < least:
                break
            try:
                manifest = storage.read_manifest(folder)
                if now is not None and manifest == now.manifest:
                    return False
                self._now = self._opened(folder, manifest)
                return True
            except (DataError, ConfigError, OSError) as error:
                if not folder.is_dir() and folder != self._path:
                    return None
                self.fault = self.fault or f"{folder}: {error}"
        return False

    def _opened(self, folder: Path, manifest: Manifest) -> RowSnapshot:
        files, layers = Files(folder, manifest, self._mapped), dict[Content, Layer]()
        tables: dict[str, _Table] = {}
        segments: dict[StoredFile, Segment] = {}

        def layer(at: str) -> Layer:
            key = content(manifest, at)
            if key not in layers:
                layers[key] = self._layers[key] if key in self._layers else Layer(files, manifest, at)
            return layers[key]

        for match in filter(None, (re.fullmatch(r"table/(.+)/count", name) for name in manifest.tensors)):
            name, decay = match[1], manifest.tensors.get(f"table/{match[1]}/decay")
            decayed = float(files.array(decay.boxes[0])) if decay else 0.0
            at, count = layer_names(manifest, name), int(files.array(manifest.tensors[match[0]].boxes[0]))
            if f"table/{name}/columns/rows" in manifest.tensors:
                tables[name], opened = _on_disk(files, manifest, name, decayed, self._segments)
                if count and not tables[name].layers:
                    raise DataError(f"table {name} has {count} rows by its own count, and no files")
                segments |= opened
                continue
            if len(at) == 1 and len(layer(at[0])) != count:
                raise DataError(f"table {name} has {count} rows by its own count, and ids of {len(layer(at[0]))}")
            rows = [stored for each in at if (stored := manifest.tensors.get(f"{each}rows"))]
            kind = np.float64 if rows and rows[0].dtype == "F64" else np.float32
            tables[name] = _Table([layer(each) for each in at], rows[0].shape[1] if rows else 0, kind, decayed)
        self._layers, self._segments = layers, segments
        return RowSnapshot(manifest, tables)


_READERS: weakref.WeakSet[RowReader] = weakref.WeakSet()


def _unlock() -> None:
    """In a process that was forked: a thread that held a lock is not there, and would hold it for ever."""
    for reader in _READERS:
        reader._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def _on_disk(
    files: Files, manifest: Manifest, table: str, decay: float, known: Mapping[StoredFile, Segment]
) -> tuple[_Table, dict[StoredFile, Segment]]:
    """A table that lay on disk, and the files that it has open; of these `known` ones are not opened again."""
    try:
        from dtf.sparse.disk.row_files import layers_of
        from dtf.sparse.disk.saved_rows import parts_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"table {table} lay on sparse.disk; {NO_NUMBA} ({error})") from error

    def place(key: str) -> slice | None:
        stored = manifest.tensors.get(f"table/{table}/{key}")
        if stored is None:
            return None
        if (stored.dtype, stored.shape) != ("I64", (2,)):
            raise DataError(f"table/{table}/{key} is {stored.dtype} {stored.shape}, not a first and a last place")
        return slice(*files.whole(stored).tolist())

    columns = place("columns/rows")
    assert columns is not None
    parts = parts_of(files.folder, manifest, f"table/{table}/")
    layers, opened = layers_of(parts, columns, place("bytes/decayed"), known)
    return _Table(layers, columns.stop - columns.start, layers[0].dtype if layers else np.float32, decay), opened
