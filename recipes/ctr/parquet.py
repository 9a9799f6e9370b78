"""Click logs in Parquet files: columns by name, row groups as blocks. The one file that imports pyarrow."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numba import njit

from dtf.core.errors import DataError
from dtf.recipes.ctr.cache import cached, stamp
from dtf.recipes.ctr.files import Plain
from dtf.recipes.ctr.hashing import MISSING, key_of, value_of, values_of
from dtf.recipes.ctr.lines import GOOD, LABEL, NONE
from dtf.recipes.ctr.log import BagKeys, Log, Parsed, RowLocations


class ParquetLog(Log):
    """Rows of Parquet files. A row group is decoded as a whole, and the last few are kept: files whose row groups have
    100,000 rows or fewer suit.

    The first opening reads the files whole, for their digest, later ones find that in `cache`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        label: str | None,
        numbers: Sequence[str],
        categories: Sequence[str],
        cache: Path,
        threads: int,
        bags: Sequence[str] = (),
        separator: str = "",
    ) -> None:
        """`label=None`: labels are 0, whether the files have a column of them or not. `bags`: columns of any number of
        categories, lists or texts with `separator` between.
        """
        self._bags, self._separator = list(bags), ord(separator or "|")
        self._labels, self._numbers, self._categories, self._kept = (
            [] if label is None else [label],
            list(numbers),
            list(categories),
            threads + 1,
        )
        self._files, self._groups = [str(path) for path in paths], list[tuple[int, int]]()
        lengths, starts = [], [0]
        for number, path in enumerate(self._files):
            try:
                meta = pq.read_metadata(path)
                names = set(pq.read_schema(path).names)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} is no readable Parquet file: {error}") from error
            for key, wanted in (
                ("label", self._labels),
                ("numbers", numbers),
                ("categories", categories),
                ("bags", bags),
            ):
                if lost := [name for name in wanted if name not in names]:
                    raise DataError(
                        f"recipe.data.{key}: {path} has no column {lost[0]}; it has {', '.join(sorted(names)[:60])}"
                    )
            lengths += [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            self._groups += [(number, group) for group in range(meta.num_row_groups)]
            starts.append(sum(lengths))
        self._bounds = np.array([0, *itertools.accumulate(lengths)], np.int64)
        self.places = RowLocations(self._files, starts, 1, " row ")
        _, said = cached(cache, ["digests", stamp(paths)], lambda _: {"digests": _digests(paths, threads)})
        more = [[*bags], separator] if bags else []
        self.digest = f"{zlib.crc32(str([said['digests'], label, numbers, categories, *more]).encode()):08x}"
        self._cached: OrderedDict[int, Parsed] = OrderedDict()
        self._lock, self._locks = threading.Lock(), [threading.Lock() for _ in self._groups]

    def parse(self, first: int, last: int) -> Parsed:
        parts = []
        while first < last:
            group = int(np.searchsorted(self._bounds, first, "right")) - 1
            start = int(self._bounds[group])
            decoded = self._decoded(group)
            parts.append(decoded.part(first - start, last - start))
            first = min(last, int(self._bounds[group + 1]))
        return Parsed.joined(parts)

    def blocks(self, rows: int) -> np.ndarray:
        return np.unique(self._bounds)

    def _decoded(self, group: int) -> Parsed:
        with self._locks[group]:
            with self._lock:
                if group in self._cached:
                    self._cached.move_to_end(group)
                    return self._cached[group]
            number, inside = self._groups[group]
            path = self._files[number]
            try:
                table = pq.ParquetFile(path).read_row_group(
                    inside, [*self._labels, *self._numbers, *self._categories, *self._bags], use_threads=False
                )
                decoded = self._columns(table)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}, row group {inside}: {error}") from error
            with self._lock:
                self._cached[group] = decoded
                while len(self._cached) > self._kept:
                    self._cached.popitem(last=False)
            return decoded

    def _columns(self, table: pa.Table) -> Parsed:
        out = Parsed.empty(len(table), len(self._numbers), len(self._categories))
        out.labels[:] = 0
        for name in self._labels:
            labels = table.column(name).cast(pa.float64()).to_numpy()
            out.why[:] = np.where((labels == 0) | (labels == 1), GOOD, LABEL)  # null is NaN
            out.labels[:] = np.where(out.why == GOOD, labels, 0)
        for d, name in enumerate(self._numbers):
            out.numbers[:, d] = table.column(name).cast(pa.int64()).fill_null(NONE).to_numpy()
        for field, name in enumerate(self._categories):
            column = table.column(name).combine_chunks()
            if _is_list(column.type):
                raise DataError(
                    f"recipe.data.categories: column {name} holds lists; name it in recipe.data.bags, which have any "
                    "number of values"
                )
            out.keys[:, field] = _keys(column, len(self._numbers) + field)
        return out._replace(bags=self._bag_keys(table) if self._bags else None).blanked()

    def _bag_keys(self, table: pa.Table) -> BagKeys:
        lengths, values = np.zeros((len(table), len(self._bags)), np.int64), list[np.ndarray]()
        for field, name in enumerate(self._bags):
            column, seed = table.column(name).combine_chunks(), len(self._numbers) + len(self._categories) + field
            if _is_list(column.type):
                lengths[:, field] = (
                    pc.call_function("list_value_length", [column]).fill_null(0).to_numpy(zero_copy_only=False)
                )
                values.append(_keys(pc.call_function("list_flatten", [column]), seed))
            else:
                values.append(_split(column, self._separator, seed, lengths[:, field]))
        rows = [np.repeat(np.arange(len(table)), lengths[:, field]) for field in range(len(self._bags))]
        order = np.argsort(np.concatenate(rows), kind="stable")  # field after field within a row
        return BagKeys(np.concatenate(values)[order], lengths)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _split(column: pa.Array, separator: int, field: int, lengths: np.ndarray) -> np.ndarray:
    """hash(field, value) of the values of each text, and how many it has, into `lengths`. What is empty is none."""
    content, bounds = _bytes(column)
    keys = np.empty(len(content) // 2 + len(bounds), np.int64)
    return keys[: _split_texts(content, bounds, np.uint8(separator), field, keys, lengths)].copy()


def _bytes(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all texts, and where each begins and the last one ends."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    binary = column.cast(pa.large_binary())
    bounds = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
    content = binary.buffers()[2]
    return np.frombuffer(content, np.uint8) if content is not None else np.zeros(0, np.uint8), bounds


def _keys(column: pa.Array, field: int) -> np.ndarray:
    """hash(field, value) of each row: of an integer itself, of a text its bytes."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type):
        values = column.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=False).view(np.uint64)
    else:
        content, bounds = _bytes(column)
        values = np.empty(len(column), np.uint64)
        values_of(content, bounds, values)
    keys = np.empty(len(values), np.int64)
    _hash(values, field, keys)
    keys[column.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return keys


@njit(cache=True, nogil=True)
def _hash(values, field, keys):
    for i in range(len(values)):
        keys[i] = key_of(field, values[i])


@njit(cache=True, nogil=True)
def _split_texts(content, bounds, separator, field, keys, lengths):
    count = 0
    for i in range(len(lengths)):
        before, first = count, bounds[i]
        for at in range(bounds[i], bounds[i + 1] + 1):
            if at == bounds[i + 1] or content[at] == separator:
                if at > first:
                    keys[count] = key_of(field, value_of(content, first, at))
                    count += 1
                first = at + 1
        lengths[i] = count - before
    return count


def _digests(paths: Sequence[Path], threads: int) -> list[int]:
    with ThreadPoolExecutor(threads, "digest") as pool:
        digests = [
            [
                digest
                for future in Plain(path).scan(lambda chunk: zlib.crc32(chunk.data), pool)
                for digest in future.result()
            ]
            for path in paths
        ]
    return [zlib.crc32(np.array(chunks, np.uint32).data) for chunks in digests]
