"""Sparse tables in checkpoints: which tensors each rank writes, and how any number of ranks takes rows from them."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import NamedTuple

import numpy as np
import torch

from dtf.api.task import Source
from dtf.core.errors import DataError
from dtf.core.types import Box
from dtf.distributed.world import World
from dtf.sparse.id_arrays import unique
from dtf.sparse.life import SCORE, first_scores
from dtf.sparse.living_table import LivingTable
from dtf.sparse.row_index import HashedIndex
from dtf.sparse.row_parts import DECAYED, columns_of, extra_of, extras_of
from dtf.sparse.store import SparseTable
from dtf.sparse.table_layouts import ShardedTable

COUNT, DECAY, REMOVED, COLUMNS, BYTES = "count", "decay", "removed", "columns", "bytes"
"""In a checkpoint: rows over all ranks; `SparseTable.decayed`; ids that left before a layer of changes was saved; of a
table on disk, see `dtf.sparse.disk.saved_rows`, twice.
"""

_ROWS = "rows"

ROWS_PER_READ = 1 << 18
"""Rows of a table that are read from a checkpoint at a time."""


def load_table(name: str, table: ShardedTable, source: Source, resume: bool) -> None:
    """Take this rank's part of a table from a checkpoint. `resume=False`: only the rows, as an evaluation sees them,
    for another run. DataError where the checkpoint has no such table.
    """
    prefix, names = f"table/{name}/", source.names()
    if resume and isinstance(table.store, LivingTable):
        _load_shards(prefix, table, table.store, source, names)
    decay = float(source.read(f"{prefix}{DECAY}")) if f"{prefix}{DECAY}" in names else None
    if resume and decay is not None:
        table.store.decayed = decay
    if any(each.startswith(f"{prefix}{COLUMNS}/") for each in names):
        _load_files(name, table, source, names, decay, resume)
    else:
        _load_rows(name, table, source, names, decay, resume)


def steps_of(source: Source) -> int:
    """How many steps the tables of a checkpoint have had."""
    return source.scalars.get("program", source.scalars).get("table_steps", 0)


def boxes_on(name: str, table: ShardedTable, world: World, layer: int | None) -> list[Box]:
    """Ids, rows and their state, as this rank holds them: after those of the ranks before it, where ranks hold
    different rows.
    """
    if world.rank and not table.by_rows and not table.by_columns:
        return []  # the first rank has the same
    counts = torch.zeros((world.size if table.by_rows else 1, len(PartSizes._fields)), dtype=torch.int64)
    here = world.rank if table.by_rows else 0
    counts[here] = torch.tensor(part_sizes(table.store, layer))
    if table.by_rows:
        world.reduce(counts)
    before, total = PartSizes(*counts[:here].sum(0).tolist()), PartSizes(*counts.sum(0).tolist())
    return boxes_of(name, table, world.rank == 0, before, total, layer)


class PartSizes(NamedTuple):
    """Of a part of a table, or several: rows and removed ids that a save writes, and rows that there are."""

    written: int
    removed: int
    rows: int


def part_sizes(store: SparseTable, layer: int | None) -> PartSizes:
    """What a save of a layer writes of this part; see `Box.layer`."""
    return PartSizes(*(store.change_counts() if layer else (len(store), 0)), len(store))


def boxes_of(
    name: str, table: ShardedTable, first: bool, before: PartSizes, total: PartSizes, layer: int | None = None
) -> list[Box]:
    """One part of a table, of all parts together `total`, of which `before` come first. `first`: whether it also tells
    what all parts have alike. `layer`: see `Box.layer`; from the first save of one on the table keeps track of changes.
    """
    prefix, store = f"table/{name}/", table.store
    boxes = [Box(f"{prefix}{COUNT}", torch.tensor(total.rows), (), ())] if first else []
    by_shard = _shard_boxes(name, table) if first or table.by_rows else []
    if table.on_disk:  # rows are files, see `ShardedTables.set_aside`
        return boxes + by_shard + (_described(name, table) if first else [])
    (ids, rows, states), removed = store.changes() if layer else (store.export(), np.empty(0, np.int64))
    if layer is not None:
        store.keep_changes()
    if first and DECAYED in states:
        boxes.append(Box(f"{prefix}{DECAY}", torch.tensor(store.decayed, dtype=torch.float64), (), ()))
    at = f"{prefix}delta_{layer}/" if layer else prefix
    for key, array in {"ids": ids, "rows": rows, **states}.items():
        if key == "rows" or table.wide.get(key):
            part, offset = torch.from_numpy(array.reshape(len(ids), store.width)), (before.written, store.columns[0])
            boxes.append(Box(at + key, part, (total.written, table.width), offset, layer))
        elif first or table.by_rows:
            boxes.append(Box(at + key, torch.from_numpy(array), (total.written,), (before.written,), layer))
    if layer and (first or table.by_rows):
        boxes.append(Box(at + REMOVED, torch.from_numpy(removed), (total.removed,), (before.removed,), layer))
    return boxes + by_shard


def _described(name: str, table: ShardedTable) -> list[Box]:
    """What a checkpoint tells of a table on disk beside its files."""
    prefix, decayed = f"table/{name}/", torch.tensor(table.store.decayed, dtype=torch.float64)
    decay = [Box(f"{prefix}{DECAY}", decayed, (), ())] if table.store.rule.decays or table.store.decayed else []
    places = {COLUMNS: _record_columns(table), BYTES: _record_bytes(table)}
    return decay + [
        Box(f"{prefix}{kind}/{key}", torch.tensor(ends), (2,), (0,))
        for kind, kept in places.items()
        for key, ends in kept.items()
    ]


def _load_files(
    name: str, table: ShardedTable, source: Source, names: set[str], decay: float | None, resume: bool
) -> None:
    """Take this rank's part of a table that lay on disk."""
    from dtf.sparse.disk.saved_rows import parts_in, rows_of

    store, (kept, beside) = table.store, (_places(f"table/{name}/{kind}/", source) for kind in (COLUMNS, BYTES))
    wanted, step = _record_columns(table), steps_of(source) if resume else 0
    if any(kept.get(key) != ends for key, ends in wanted.items() if resume or key == _ROWS):
        raise DataError(
            f"{source.place}: table {name} has the columns {kept} in its records, and this run has {wanted}; give the "
            "table the width and the row optimizer that it had, or start without this checkpoint"
        )
    parts = parts_in(source.folder, names, f"table/{name}/")
    beside = {key: slice(*ends) for key, ends in beside.items()}
    if resume and store.load(parts, beside, step):
        return
    first, last = store.columns
    columns = columns_of(store.rule, table.width) if resume else {}
    for _, ids, records, extra in (batch for part in parts for batch in rows_of(part)):
        owned = table.owns(ids)
        rows, more = records[owned, first:last], extra[owned]
        found = {key: extra_of(key, more, where) for key, where in beside.items()}
        states = {
            key: records[owned, each][:, slice(first, last) if table.wide[key] else slice(None)]
            for key, each in columns.items()
        }
        if resume:
            states |= {key: found[key] for key in (DECAYED, *store.statistics) if key in found}
        elif DECAYED in found and decay is not None:
            rows = rows * np.exp(decay - found[DECAYED])[:, None]
        scores = None
        if table.by_columns and isinstance(store, LivingTable) and SCORE not in states:
            now = np.exp(decay - found[DECAYED])[:, None] if DECAYED in found and decay is not None else 1
            scores = first_scores(records[owned, : table.width] * now)  # the same on all ranks
        store.put(ids[owned], rows, states if resume else None, step, scores)


def _places(prefix: str, source: Source) -> dict[str, list[int]]:
    """Where each part of a record is, by the rest of the names that begin with `prefix`."""
    return {key.removeprefix(prefix): source.read(key).tolist() for key in source.names() if key.startswith(prefix)}


def _record_bytes(table: ShardedTable) -> dict[str, list[int]]:
    """First byte and the one after the last, of what is kept beside records."""
    return {key: [place.start, place.stop] for key, place in extras_of(table.store.rule).items()}


def _record_columns(table: ShardedTable) -> dict[str, list[int]]:
    """First column and the one after the last, of rows and states in records side by side."""
    states = columns_of(table.store.rule, table.width).items()
    return {_ROWS: [0, table.width]} | {key: [columns.start, columns.stop] for key, columns in states}


def _shard_boxes(name: str, table: ShardedTable) -> list[Box]:
    """What is kept by shard, of the shards that are here."""
    if not isinstance(table.store, LivingTable):
        return []
    first, last = table.owned_shards
    if first == last:
        return []
    return [
        Box(f"table/{name}/{key}", torch.from_numpy(array[first:last].copy()), array.shape, _at(first, array))
        for key, array in table.store.by_shard().items()
    ]


def _load_rows(
    name: str, table: ShardedTable, source: Source, names: Container[str], decay: float | None, resume: bool
) -> None:
    """Take this rank's rows: each from the newest layer that has its id, unless a newer one removes it."""
    prefix = f"table/{name}/"
    layers, count, found, owns_all = _layers(prefix, source), int(source.read(f"{prefix}{COUNT}")), 0, True
    step = steps_of(source) if resume else 0
    newer = _IdSet()
    for layer in [*reversed(layers), 0]:
        at = f"{prefix}delta_{layer}/" if layer else prefix
        all_ids, removed = (_ids(source, at + key, names) for key in ("ids", REMOVED))
        if not layers and len(all_ids) != count:
            raise DataError(
                f"{source.place}: table {name} has {count} rows by its own count, and ids of {len(all_ids)}"
            )
        for first in range(0, len(all_ids), ROWS_PER_READ):
            ids = all_ids[first : first + ROWS_PER_READ]
            owned = table.owns(ids)
            owns_all &= bool(owned.all())
            wanted = np.flatnonzero(owned & ~newer.has(ids)) if layers else np.flatnonzero(owned)
            found += len(wanted)
            parts = _kept(table, at, names, decay, resume)
            read = _read(table, source, at, len(all_ids), first, len(ids), wanted, parts)
            rows, decayed = read.pop("rows"), read.get(DECAYED)
            if decay is not None and decayed is None:  # saved before there was any decay
                read[DECAYED] = decayed = np.zeros(len(wanted))
            if not resume and decay is not None and decayed is not None:
                rows = rows * np.exp(decay - decayed)[:, None]
            scores = None
            if table.by_columns and isinstance(table.store, LivingTable) and SCORE not in read:
                whole = source.read(
                    f"{at}{_ROWS}", (first, 0), (len(ids), table.width), (len(all_ids), table.width)
                ).numpy()[wanted]
                now = 1 if decay is None or decayed is None else np.exp(decay - decayed)[:, None]
                scores = first_scores(whole * now)  # the same on all ranks
            try:
                table.store.put(ids[wanted], rows, read if resume else None, step, scores)
            except DataError as error:
                raise DataError(f"{source.place}: {error}") from error
        if layer:
            newer.add(*(ids[table.owns(ids)] for ids in (all_ids, removed)))
    if owns_all and found != count:
        raise DataError(f"{source.place}: table {name} has {count} rows by its own count, and {found} in its layers")


def _layers(prefix: str, source: Source) -> list[int]:
    """The layers of changes that a table has in a checkpoint, the oldest first."""
    found = (re.fullmatch(rf"{re.escape(prefix)}delta_([1-9]\d{{0,8}})/\w+(?:\.\w+)?", name) for name in source.names())
    return sorted({int(match[1]) for match in found if match})


def _ids(source: Source, name: str, names: Container[str]) -> np.ndarray:
    """A tensor of ids (n,); of none where the checkpoint has it not."""
    if name not in names:
        return np.empty(0, np.int64)
    ids = source.read(name)
    if ids.dtype is not torch.int64 or ids.dim() != 1:
        raise DataError(f"{source.place}: {name} is {ids.dtype} {tuple(ids.shape)}, not 64-bit integers in a row")
    return ids.numpy()


def _kept(table: ShardedTable, at: str, names: Container[str], decay: float | None, resume: bool) -> dict[str, bool]:
    """What is read of rows -> whether it has as many columns as they have."""
    beside = [*([DECAYED] if decay is not None else []), *(table.store.statistics if resume else {})]
    return {"rows": True, **(table.wide if resume else {}), **{key: False for key in beside if at + key in names}}


def _read(
    table: ShardedTable,
    source: Source,
    at: str,
    rows: int,
    first: int,
    count: int,
    wanted: np.ndarray,
    parts: Mapping[str, bool],
) -> dict[str, np.ndarray]:
    """The `wanted` ones of `count` rows from `first` on, of `rows` in all."""
    left, right = table.store.columns
    wide = (first, left), (count, right - left), (rows, table.width)
    narrow = (first,), (count,), (rows,)
    return {key: source.read(at + key, *(wide if each else narrow)).numpy()[wanted] for key, each in parts.items()}


class _IdSet:
    """Ids, found by hashing."""

    def __init__(self) -> None:
        from dtf.sparse import id_kernels

        self._index = HashedIndex(id_kernels)

    def has(self, ids: np.ndarray) -> np.ndarray:
        return self._index.find(ids)[0] >= 0

    def add(self, *ids: np.ndarray) -> None:
        new = unique(np.concatenate(ids))[0]
        new = new[(new != -1) & ~self.has(new)]
        self._index.insert(new, np.zeros(len(new), np.int64))


def _load_shards(prefix: str, table: ShardedTable, store: LivingTable, source: Source, names: Container[str]) -> None:
    first, last = table.owned_shards
    for key, array in store.by_shard().items():
        if prefix + key in names and last > first:
            shape = last - first, *array.shape[1:]
            array[first:last] = source.read(prefix + key, _at(first, array), shape, array.shape).numpy()


def _at(first: int, array: np.ndarray) -> tuple[int, ...]:
    return (first, *(0,) * (array.ndim - 1))
