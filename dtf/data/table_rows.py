"""Tables of numbers and categories, CSV, TSV or Parquet, as rows by number: read once, then mapped from disk."""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtf.api.recipe import Dataset
from dtf.core.errors import ConfigError, DataError
from dtf.data.file_patterns import files_of
from dtf.data.made_once import cache_folder, made_once, name_of, state_of
from dtf.data.parquet_rows import require_pyarrow

FORMAT = 2  # of the written files; part of their names
_COLUMN = re.compile(r"CSV column #(\d+)")
_DELIMITERS = {".tsv": "\t", ".tab": "\t"}
_EMPTY = ["", "NA", "N/A", "NaN", "nan", "null", "NULL"]
"""How an empty field is written. Of a category the first only: the others may be names, as NA is of Namibia."""
_NUMBER = re.compile("-?[0-9]{1,18}")

_log = logging.getLogger(__name__)


class Table(Dataset):
    """See `table_rows`. `categories`: the values of each categorical column, by number; `classes`: those of `label`."""

    prefetch = 0  # mapped: there is nothing to wait for

    def __init__(self, folder: Path, about: dict[str, Any], chosen: slice) -> None:
        self._about, self._rows = about, range(about["rows"])[chosen]
        self.categories: dict[str, list[str]] = {
            name: values for name, values in about["values"].items() if name in about["categorical"]
        }
        self.classes: list[str] = about["values"].get(about["label"], [])
        rows, self._parts = about["rows"], {}
        for part, (kind, width) in about["parts"].items():
            shape = (rows, width) if width else (rows,)
            empty = not rows or (width == 0 and part != "targets")
            self._parts[part] = np.empty(shape, kind) if empty else np.memmap(folder / part, kind, "r", shape=shape)

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Any]:
        places = self._rows.start + self._rows.step * ids
        found = {part: torch.from_numpy(np.asarray(stored[places])) for part, stored in self._parts.items()}
        targets = found.pop("targets")
        if "categorical" in found:
            found["categorical"] = found["categorical"].long()
        targets = targets if targets.is_floating_point() else targets.long()
        return found if len(found) > 1 else next(iter(found.values())), targets

    def groups(self) -> np.ndarray | None:
        return self._parts["targets"][np.array(self._rows)].astype(np.int64) if self.classes else None

    def fingerprint(self) -> str:
        told = [self._about["digests"], self._about["values"], str(self._rows)]
        return f"{len(self)} {zlib.crc32(json.dumps(told).encode()):08x}"


def table_rows(
    files: str | Path | Sequence[str | Path],
    *,
    numeric: Sequence[str] = (),
    categorical: Sequence[str] = (),
    label: str = "",
    target: str = "",
    like: Table | None = None,
    missing: float | None = None,
    rows: slice = slice(None),
    columns: Sequence[str] | None = None,
    delimiter: str = "",
    cache: str | Path | None = None,
) -> Table:
    """The rows of CSV, TSV or Parquet files, in their order, by columns. Larger than memory or not.

    `numeric`: columns that are inputs (B, F) float32. `categorical`: columns that are inputs (B, C) int64, the number
    of each value in the order of values; of both kinds, inputs are the dict {numeric, categorical}. `label`: a column
    of classes, targets (B,) int64; or `target`: a column of numbers, targets (B,) float32. `like`: the table whose
    values count, for evaluation rows: a category that it does not have gets the number after its last one, as an empty
    field does, and a class that it does not have is refused. `missing`: the number for an empty field of a column of
    numbers; by default one is refused. `rows`: some of them, `slice(-400, None)` the last 400; values are those of all.
    `columns`: the names of columns, for files without a line of names. `delimiter`: by default a comma, in .tsv a tab.

    The files are read once, into `cache` (by default `~/.cache/dtf/rows`), 4 bytes a field. DataError names what
    cannot be read, ConfigError what does not fit together.
    """
    require_pyarrow()
    if not numeric and not categorical:
        raise ConfigError("table_rows: no inputs; name columns with numeric=[...] or categorical=[...]")
    if bool(label) == bool(target):
        raise ConfigError("table_rows: give either label= (a column of classes) or target= (a column of numbers)")
    used = [*numeric, *categorical, label or target]
    twice = next((name for name in used if used.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"table_rows: the column {twice} is named twice; it is one of numeric, categorical and the target"
        )
    paths = files_of(files, ".csv")
    source = _Source(paths, list(numeric), list(categorical), label, target, missing, columns, delimiter)
    given = None if like is None else {**like.categories, **({label: like.classes} if label else {})}
    states = [[os.path.realpath(path), *state_of(path)] for path in paths]
    folder = cache_folder(cache) / name_of("table", FORMAT, states, source.key, given)
    return Table(folder, made_once(folder, _intact, lambda building: source.write(building, given)), rows)


class _Source:
    """The files of a table, and what is wanted of them."""

    def __init__(
        self,
        paths: list[Path],
        numeric: list[str],
        categorical: list[str],
        label: str,
        target: str,
        missing: float | None,
        columns: Sequence[str] | None,
        delimiter: str,
    ) -> None:
        self._paths, self._numeric, self._categorical, self._label, self._target = (
            paths,
            numeric,
            categorical,
            label,
            target,
        )
        self._missing, self._columns, self._delimiter = missing, columns, delimiter
        self.key = [numeric, categorical, label, target, missing, list(columns or ()), delimiter]

    def write(self, folder: Path, given: dict[str, list[str]] | None) -> None:
        """Write the arrays of all rows into a new folder, with `about.json`."""
        folder.mkdir()
        texts = [*self._categorical, *([self._label] if self._label else [])]
        values = given if given is not None else self._values(texts) if texts else {}
        target = self._label or self._target
        parts = {"numeric": ("<f4", len(self._numeric)), "categorical": ("<i4", len(self._categorical))}
        parts = {part: of for part, of in parts.items() if of[1]}
        parts["targets"] = ("<i4" if self._label else "<f4", 0)
        rows, digests = 0, dict.fromkeys(parts, 0)
        files = {part: open(folder / part, "wb") for part in parts}  # noqa: SIM115 - closed below
        try:
            for path, row, batch in self._batches():
                arrays = {"numeric": self._numbers(path, row, batch, self._numeric)}
                arrays["categorical"] = self._numbered(path, row, batch, self._categorical, values)
                arrays["targets"] = (
                    self._numbered(path, row, batch, [target], values)
                    if self._label
                    else self._numbers(path, row, batch, [target])
                )[:, 0]
                for part, file in files.items():
                    content = np.ascontiguousarray(arrays[part]).astype(parts[part][0], copy=False).tobytes()
                    digests[part] = zlib.crc32(content, digests[part])
                    file.write(content)
                rows += len(batch)
        finally:
            for file in files.values():
                file.close()
        about = {"rows": rows, "parts": parts, "digests": digests, "values": values}
        about |= {"categorical": self._categorical, "label": self._label}
        (folder / "about.json").write_text(json.dumps(about))

    def _values(self, names: list[str]) -> dict[str, list[str]]:
        """The distinct values of columns: numbers in their order, texts in theirs."""
        seen: dict[str, set[str]] = {name: set() for name in names}
        for _, _, batch in self._batches():
            for name in names:
                seen[name].update(value for value in self._texts(batch, name).unique().to_pylist() if value is not None)
        return {name: sorted(found, key=_order) for name, found in seen.items()}

    def _numbers(self, path: Path, row: int, batch: Any, names: list[str]) -> np.ndarray:
        """(rows, columns) float32."""
        import pyarrow as pa

        found = np.empty((len(batch), len(names)), np.float32)
        for place, name in enumerate(names):
            column = batch.column(name)
            self._refuse_empty(path, row, name, column)
            try:
                numbers = column.cast(pa.float64()).fill_null(self._missing or 0.0).to_numpy(zero_copy_only=False)
            except pa.ArrowException as error:
                raise DataError(f"{path}: {name} is no column of numbers: {error}") from error
            with np.errstate(over="ignore"):
                found[:, place] = numbers
            wrong = ~np.isfinite(found[:, place])
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"{path}: {name}={numbers[at]} in row {row + at} is no finite number of 32 bits; mend it"
                )
        return found

    def _refuse_empty(self, path: Path, row: int, name: str, column: Any) -> None:
        empty = np.asarray(column.is_null())
        if empty.any() and self._missing is None:
            raise DataError(
                f"{path}: {name} is empty in row {row + int(empty.argmax())}; give missing=NUMBER, or mend it "
                "(NA, nan and null are empty, too)"
            )

    def _numbered(self, path: Path, row: int, batch: Any, names: list[str], values: dict[str, list[str]]) -> np.ndarray:
        """(rows, columns) int32: the number of each value."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = np.empty((len(batch), len(names)), np.int32)
        for place, name in enumerate(names):
            texts = self._texts(batch, name)
            places = pc.index_in(texts, value_set=pa.array(values[name], pa.string()))  # type: ignore[attr-defined]
            unknown = np.asarray(places.is_null())
            if name == self._label and unknown.any():
                at = int(unknown.argmax())
                known = f"is none of the {len(values[name])} classes" if texts[at].is_valid else "is empty"
                raise DataError(
                    f"{path}: {name}={texts[at].as_py()!r} in row {row + at} {known}; mend or remove the row"
                )
            found[:, place] = places.fill_null(len(values[name])).to_numpy(zero_copy_only=False)
        return found

    def _texts(self, batch: Any, name: str) -> Any:
        """A column as texts; null where it is empty."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts, empty = batch.column(name).cast(pa.string()), _EMPTY if name == self._label else _EMPTY[:1]
        is_empty = pc.is_in(texts, value_set=pa.array(empty))  # type: ignore[attr-defined]
        return pc.if_else(is_empty, pa.scalar(None, pa.string()), texts)  # type: ignore[attr-defined]

    def _batches(self) -> Iterator[tuple[Path, int, Any]]:
        """(file, number of the first row in it, from 0, record batch) with the columns that are used."""
        import pyarrow as pa

        for path in self._paths:
            row = 0
            try:
                for batch in self._read(path):
                    yield path, row, batch
                    row += len(batch)
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path} cannot be read as a table: {error}") from error

    def _read(self, path: Path) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import csv

        texts = [*self._categorical, *([self._label] if self._label else [])]
        numbers = [*self._numeric, *([self._target] if self._target else [])]
        wanted = [*texts, *numbers]
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                _check_columns(path, wanted, file.schema_arrow.names)
                yield from file.iter_batches(columns=wanted, use_threads=False)
            return
        options = csv.ConvertOptions(
            include_columns=wanted,
            column_types={**dict.fromkeys(texts, pa.string()), **dict.fromkeys(numbers, pa.float64())},
            null_values=_EMPTY,
        )
        delimiter = self._delimiter or _DELIMITERS.get(path.suffix.lower(), ",")
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        read = csv.ReadOptions(column_names=self._columns, use_threads=False)
        with csv.open_csv(path, read, parse) as reader:
            _check_columns(path, wanted, there := reader.schema.names)
        try:
            with csv.open_csv(path, read, parse, options) as reader:
                for batch in reader:
                    if len(batch):
                        yield batch.select(wanted)
        except pa.ArrowInvalid as error:  # it tells the number of the column, from 0
            raise pa.ArrowInvalid(_COLUMN.sub(lambda found: f"column {there[int(found[1])]}", str(error))) from error


def _check_columns(path: Path, wanted: list[str], there: list[str]) -> None:
    lost = next((name for name in wanted if name not in there), None)
    if lost is not None:
        raise DataError(
            f"{path} has no column {lost}; it has {', '.join(there[:60])}. Files without a line of names need "
            "columns=[...]"
        )
    twice = next((name for name in wanted if there.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has the column {twice} more than once; rename one")


def _order(value: str) -> tuple[bool, float, str]:
    """Whole numbers by size, before texts by letter."""
    number = _NUMBER.fullmatch(value)
    return number is None, int(value) if number else 0, value


def _intact(folder: Path) -> dict[str, Any] | None:
    """What `about.json` says, where the arrays are those that were written."""
    try:
        about = json.loads((folder / "about.json").read_text())
        whole = all(_crc32(folder / part) == digest for part, digest in about["digests"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not whole:
        _log.warning("%s is damaged: the table is read again", folder)
    return about if whole else None


def _crc32(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, "r").data) if path.stat().st_size else 0
