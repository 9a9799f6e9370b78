"""Rows of Parquet files by number. The files are written once as Arrow, of which any row can be mapped."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dtf.api.recipe import Dataset
from dtf.core.errors import ConfigError, DataError
from dtf.data.file_patterns import files_of
from dtf.data.made_once import cache_folder, made_once, name_of, state_of
from dtf.data.map_style import map_style
from dtf.data.samples import image

FORMAT = 1  # of the written files; part of their names
_ROWS, _BYTES = 4096, 8 << 20
"""Most rows, and about most bytes, of a batch in an Arrow file: what is checked when the first of its rows is read."""

_log = logging.getLogger(__name__)


def parquet_rows(
    files: str | Path | Sequence[str | Path],
    decode: Callable[[dict[str, Any]], Any] | None = None,
    *,
    columns: Sequence[str] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    target: str | int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    shapes_vary: bool | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """The rows of Parquet files, numbered in the order of the files.

    `files`: `part-{0..9}.parquet`, `parts/*.parquet`, a folder, or a list of such. `decode`: makes an item of a row, a
    dict of Python values by column; by default numbers stay, lists of numbers become tensors (of fractions float32),
    and pictures (`{bytes, path}`, as Hugging Face writes them) uint8 tensors (3, H, W). `columns`: those to read, by
    default all. The other arguments: see `map_style`. `cache`: the folder of the rows as Arrow, which needs the room
    that they take without compression; by default `~/.cache/dtf/rows`.

    DataError names the file that is missing, damaged, or lacks a column. ConfigError without pyarrow.
    """
    require_pyarrow()
    rows = ArrowRows(files_of(files, ".parquet"), columns, cache_folder(cache), row_of if decode is None else decode)
    return map_style(rows, collate_fn=collate_fn, target=target, threads=threads, seed=seed, shapes_vary=shapes_vary)


def require_pyarrow() -> None:
    """Raise ConfigError where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs pyarrow ({error}): pip install 'dtf[parquet]'") from error


class ArrowRows:
    """A map-style data set: row by number, decoded. Threads may read at once."""

    decoding_threads = 2

    def __init__(
        self, files: Sequence[Path], columns: Sequence[str] | None, cache: Path, decode: Callable[[dict], Any]
    ) -> None:
        self._decode = decode
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "arrow") as pool:
            first = os.getpid() % len(files)  # ranks that start together share the work
            order = [*range(first, len(files)), *range(first)]
            made = dict(zip(order, pool.map(lambda n: ArrowFile(files[n], columns, cache), order), strict=True))
        self._files = [made[number] for number in range(len(files))]
        self._starts = [0, *itertools.accumulate(len(file) for file in self._files)]
        for file in self._files[1:]:
            if file.schema != self._files[0].schema:
                raise DataError(
                    f"{file.path} has other columns than {files[0]}: {file.schema} and not {made[0].schema}"
                )

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Any:
        at = bisect.bisect_right(self._starts, number) - 1
        row = self._files[at].row(number - self._starts[at])
        try:
            return self._decode(row)
        except DataError as error:
            raise DataError(f"{self._files[at].path}, row {number - self._starts[at]}: {error}") from error

    def fingerprint(self) -> str:
        return f"{len(self)} {zlib.crc32(str([file.digests for file in self._files]).encode()):08x}"


class ArrowFile:
    """The rows of one Parquet file, as Arrow in the cache."""

    def __init__(self, path: Path, columns: Sequence[str] | None, cache: Path) -> None:
        import pyarrow as pa

        self.path, state = path, state_of(path)
        self._folder = cache / name_of("parquet", FORMAT, os.path.realpath(path), list(columns) if columns else None)

        def fits(folder: Path) -> dict[str, Any] | None:
            try:
                about = json.loads((folder / "about.json").read_text())
                whole = about["state"] == state and (folder / "rows.arrow").stat().st_size == about["bytes"]
                return about if whole else None
            except (OSError, ValueError, KeyError, TypeError):
                return None

        def make(folder: Path) -> None:
            if self._folder.exists():
                _log.warning("%s has changed since it was read, or its cache is damaged: it is read again", path)
            folder.mkdir()
            _write(path, columns, folder / "rows.arrow")
            digests = [[len(batch), _digest(batch)] for batch in _batches(folder)]
            about = {"state": state, "bytes": (folder / "rows.arrow").stat().st_size, "batches": digests}
            (folder / "about.json").write_text(json.dumps(about))

        about = made_once(self._folder, fits, make)
        self.digests = [digest for _, digest in about["batches"]]
        self._starts = [0, *itertools.accumulate(rows for rows, _ in about["batches"])]
        self._checked = [False] * len(self.digests)
        self._lock = threading.Lock()
        self._reader = pa.ipc.open_file(pa.memory_map(str(self._folder / "rows.arrow")))
        self.schema = str(self._reader.schema.remove_metadata())

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> dict[str, Any]:
        """A row as Python values. DataError where its bytes are others than those that were written."""
        at = bisect.bisect_right(self._starts, number) - 1
        with self._lock:
            batch = self._reader.get_batch(at)
        if not self._checked[at]:
            if _digest(batch) != self.digests[at]:
                raise DataError(f"{self._folder}, the cache of {self.path}, is damaged; remove it and start again")
            self._checked[at] = True
        return batch.slice(number - self._starts[at], 1).to_pylist()[0]


def _write(path: Path, columns: Sequence[str] | None, into: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            lost = [name for name in columns or () if name not in file.schema_arrow.names]
            if lost:
                known = ", ".join(file.schema_arrow.names[:60])
                raise DataError(f"{path} has no column {lost[0]}; it has {known}")
            names = list(columns) if columns else file.schema_arrow.names
            schema = pa.schema([file.schema_arrow.field(name) for name in names])
            for field in schema:
                if getattr(field.type, "extension_name", "") == "arrow.fixed_shape_tensor":
                    raise DataError(f"{path}: column {field.name} is {field.type}; write lists of lists of numbers")
            with pa.OSFile(str(into), "wb") as out, pa.ipc.new_file(out, schema) as writer:
                for batch in file.iter_batches(_ROWS, columns=names, use_threads=False):
                    rows = max(1, len(batch) * _BYTES // max(batch.nbytes, 1))
                    for begin in range(0, len(batch), rows):
                        writer.write_batch(batch.select(names).slice(begin, rows))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet, nor its rows be written: {error}") from error


def _batches(folder: Path) -> Any:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def _digest(batch: Any) -> int:
    digest = 0
    for column in batch.columns:
        for buffer in column.buffers():
            digest = zlib.crc32(buffer, digest) if buffer is not None else zlib.crc32(b"none", digest)
    return digest


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """See `parquet_rows`: numbers stay, lists of numbers are tensors, pictures are decoded."""
    return {name: _value(name, value) for name, value in row.items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        try:
            return image(value["bytes"])
        except Exception as error:  # whatever Pillow's parsers stumble on
            raise DataError(f"column {name}: {value.get('path') or 'a picture'} cannot be decoded: {error}") from error
    if value is None or (isinstance(value, list) and None in value):
        raise DataError(f"column {name} is empty; mend it, or give decode=, which makes an item of a row")
    if isinstance(value, list):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # of texts, or of several lengths
            return value
    return value
