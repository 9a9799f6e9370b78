"""All sparse tables of a run over its ranks: rows replace ids before a step, gradients go to the rank that holds the
rows after it. Checkpoints of tables are written and read here.

A table lies in host memory. How one table lies on ranks is `dtf.sparse.table_layouts`; how it keeps and updates its
rows is `dtf.sparse.store`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Recipe
from dtf.api.sparse_table import Table
from dtf.api.task import Source, Weights
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Batch, Box
from dtf.distributed.world import World
from dtf.sparse.living_table import LivingTable
from dtf.sparse.row_index import HashedIndex
from dtf.sparse.store import DECAYED, SparseTable, columns_of, full, unique
from dtf.sparse.table_inputs import TableInputs
from dtf.sparse.table_layouts import ShardedTable

if TYPE_CHECKING:
    from dtf.sparse.disk.saved_rows import RowsSetAside

COUNT, DECAY, REMOVED, COLUMNS = "count", "decay", "removed", "columns"
"""In a checkpoint: rows over all ranks; `SparseTable.decayed`; ids that left before a layer of changes was saved; of a
table on disk, see `dtf.sparse.disk.saved_rows`.
"""

_ROWS = "rows"

LIFE_COUNTS = ("admitted", "refused", "evicted")
"""What is counted of rows that have a life, see `Life`."""

Clicks = Callable[[Any], Tensor | None]
"""See `Recipe.clicks`."""

ROWS_PER_READ = 1 << 18
"""Rows of a table that are read from a checkpoint at a time."""


class ShardedTables:
    """The sparse tables of a run on one rank.

    A step calls `lookup` for training, `backward` and `apply`, in this order. After `backward`, `norm` is the norm of
    the gradient of all rows over all ranks. All methods are collective, but for `specs`, `clear`, `learnt` and
    `byte_count`.

    `share`: the factor of each rank's gradients in their sum. `clicks`: see `Recipe.clicks`.
    """

    def __init__(
        self, tables: Mapping[str, ShardedTable], world: World, share: float, clicks: Clicks | None = None
    ) -> None:
        self._tables, self._world, self._share, self._clicks = tables, world, share, clicks
        self._asked: dict[str, TableInputs] = {}  # of the last lookup for training
        self._coming: dict[str, np.ndarray] = {}  # distinct ids of the step after the next lookup, see `expect`
        self._seen: dict[str, np.ndarray] = {}  # of tables whose rows have a life, for ids of `_asked`
        self._told = dict.fromkeys(LIFE_COUNTS, 0)
        self._layer: int | None = None
        self.norm = torch.zeros((), dtype=torch.float64)

    def lookup(self, batch: Batch, train: bool) -> Batch:
        """The batch with rows (B, F, width) in place of ids (B, F), pooled ones in place of Bags. With `train`, rows
        that do not exist are made. Collective.
        """
        inputs = dict(batch.inputs)
        coming, self._coming = self._coming if train else {}, {} if train else self._coming
        for name, table in self._tables.items():
            asked = _ids_in(batch, name, table)
            inputs |= asked.rows(table.lookup(asked.distinct, train))
            if train:
                self._asked[name] = asked
                if table.lives:
                    self._seen[name] = asked.seen(batch, self._clicks).astype(table.store.dtype)
        for name, ids in coming.items():
            self._tables[name].read_ahead(ids)
        return batch._replace(inputs=inputs)

    def expect(self, batch: Batch | None) -> None:
        """The step after the next `lookup` for training has this batch: rows on disk are read while that one computes.
        Not collective, but all ranks call it. None: this rank has nothing of that batch.
        """
        self._coming = {
            name: np.empty(0, np.int64) if batch is None else _ids_in(batch, name, table).distinct
            for name, table in self._tables.items()
            if table.on_disk
        }

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients of what the last `lookup` for training put in place of ids, by input. Inputs that are not
        named have no gradient on this rank. Sums them by id. Collective. ConfigError for a full table.
        """
        total = torch.zeros(1 + len(self._tables), dtype=torch.float64)  # squares of the gradient, rows of each table
        divided = [table for table in self._tables.values() if table.by_rows or table.by_columns]
        for name, table in self._tables.items():
            summed = self._asked.pop(name).gradients(gradients, table.width, table.store.dtype)
            if table.lives:
                summed = np.concatenate([summed, self._seen.pop(name)], axis=1)
            squares = table.merge(summed)
            if table in divided or not divided or not self._world.rank:  # of replicated ones beside others once
                total[0] += squares
        total[1:] = torch.tensor([len(table.store) for table in self._tables.values()])
        if divided:
            self._world.reduce(total)
        for (name, table), rows in zip(self._tables.items(), total[1:].tolist(), strict=True):
            if table.by_rows and rows > table.store.spec.capacity:
                raise full(name, table.store.spec.capacity, int(rows))
        self.norm = total[0].sqrt() * self._share

    def apply(self, factor: float, lr: float, step: int) -> None:
        """One optimizer step on the rows that were looked up. Their gradients are multiplied by `factor`."""
        for table in self._tables.values():
            table.apply(factor * self._share, lr, step)

    def keep_changes(self, layer: int) -> None:
        """See `KeepsChanges`."""
        self._layer = layer

    def boxes(self) -> list[Box]:
        """This rank's part of the tables, for a checkpoint. Collective."""
        layer, self._layer = self._layer, None
        return [box for name, table in self._tables.items() for box in _boxes(name, table, self._world, layer)]

    @property
    def has_files(self) -> bool:
        """Whether tables lie on disk, so that `boxes` has not all of them."""
        return any(table.on_disk for table in self._tables.values())

    def set_aside(self, number: int | None = None) -> Callable[[Path], list[dict[str, Any]]]:
        """Keep the rows that lie on disk as they are now. What it returns puts them into a checkpoint's folder, see
        `State.others`. `number`: of this process among those that write the checkpoint; None: its rank. OSError where
        the disk is full or fails. Not collective.
        """
        rank = self._world.rank if number is None else number
        aside: list[tuple[str, RowsSetAside]] = []
        for name, table in self._tables.items():
            rows = table.store.set_aside() if table.by_rows or not self._world.rank else None
            if rows is not None:
                aside.append((name, rows))

        def write(folder: Path) -> list[dict[str, Any]]:
            return [
                written
                for name, rows in aside
                for written in rows.write(folder, f"rank_{rank}.{name}", f"table/{name}/disk_{rank}")
            ]

        return write

    def load(self, source: Source, resume: bool = True) -> None:
        """Take this rank's part from a checkpoint. `resume=False`: only the rows, as an evaluation sees them, for
        another run. DataError where the checkpoint has no such table.
        """
        for name, table in self._tables.items():
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

    def start_from(self, weights: Weights, recipe: Recipe) -> None:
        """Begin with the rows of another run. ConfigError for weights of other programs, which have no tables."""
        source = weights.source()
        if source is None:
            raise ConfigError(
                f"{weights.place} holds no sparse tables, and {type(recipe).__name__} has some; give a run or a "
                "checkpoint of dtf"
            )
        self.load(source, resume=False)

    def specs(self) -> dict[str, Table]:
        """The declarations of the tables, by name."""
        return {name: table.store.spec for name, table in self._tables.items()}

    def clear(self) -> None:
        """Remove all rows on this rank. Not collective."""
        for table in self._tables.values():
            table.store.clear()

    def learnt(self, kept: Callable[[SparseTable], np.ndarray] | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> ascending ids (n,) and rows (n, width) that this rank holds, as evaluation sees them. Copies.

        `kept`: ids of those that are wanted, of each table. Not collective.
        """
        kept = kept or (lambda store: store.export().ids)
        ids_of = {name: kept(table.store) for name, table in self._tables.items()}
        return {
            name: (torch.from_numpy(ids), torch.from_numpy(self._tables[name].store.lookup(ids, False)))
            for name, ids in ids_of.items()
        }

    def life_counts(self) -> dict[str, int]:
        """What happened to rows since the last call, over all tables: additive over ranks, those that hold the same
        count as one. Empty where no rows have a life. Not collective.
        """
        stores = [
            table.store
            for table in self._tables.values()
            if isinstance(table.store, LivingTable) and (table.by_rows or not self._world.rank)
        ]
        if not any(table.lives for table in self._tables.values()):
            return {}
        before, self._told = self._told, {key: sum(getattr(store.life, key) for store in stores) for key in LIFE_COUNTS}
        return {key: self._told[key] - before[key] for key in LIFE_COUNTS}

    def byte_count(self) -> int:
        """Bytes of all rows and their optimizer state on this rank. Not collective."""
        return sum(table.store.byte_count() for table in self._tables.values())


def _ids_in(batch: Batch, name: str, table: ShardedTable) -> TableInputs:
    """What a batch has for a table."""
    spec = table.store.spec
    return TableInputs(batch.inputs, spec.inputs or (name,), spec.pooling)


def steps_of(source: Source) -> int:
    """How many steps the tables of a checkpoint have had."""
    return source.scalars.get("program", source.scalars).get("table_steps", 0)


def _boxes(name: str, table: ShardedTable, world: World, layer: int | None) -> list[Box]:
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
    if table.on_disk:  # rows are files, see `ShardedTables.set_aside`
        return boxes + (_described(name, table) if first else [])
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
    if isinstance(table.store, LivingTable) and (first or table.by_rows):
        boxes += _shard_boxes(name, table, table.store)
    return boxes


def _described(name: str, table: ShardedTable) -> list[Box]:
    """What a checkpoint tells of a table on disk beside its files."""
    prefix, decayed = f"table/{name}/", torch.tensor(table.store.decayed, dtype=torch.float64)
    decay = [Box(f"{prefix}{DECAY}", decayed, (), ())] if table.store.rule.decays else []
    columns = _record_columns(table).items()
    return decay + [Box(f"{prefix}{COLUMNS}/{key}", torch.tensor(ends), (2,), (0,)) for key, ends in columns]


def _load_files(
    name: str, table: ShardedTable, source: Source, names: set[str], decay: float | None, resume: bool
) -> None:
    """Take this rank's part of a table that lay on disk."""
    from dtf.sparse.disk.saved_rows import parts_in, rows_of

    store, place = table.store, f"table/{name}/{COLUMNS}/"
    kept = {key.removeprefix(place): source.read(key).tolist() for key in names if key.startswith(place)}
    wanted = _record_columns(table)
    if kept != wanted if resume else kept.get(_ROWS) != wanted[_ROWS]:
        raise DataError(f"{source.place}: table {name} has the columns {kept} in its records, this run has {wanted}")
    parts = parts_in(source.folder, names, f"table/{name}/")
    if resume and store.load(parts):
        return
    first, last = store.columns
    columns = columns_of(store.rule, table.width) if resume else {}
    for _, ids, records, extra in (batch for part in parts for batch in rows_of(part)):
        owned = table.owns(ids)
        rows, since = records[owned, first:last], extra[owned].view(np.float64).reshape(-1)
        states = {
            key: records[owned, each][:, slice(first, last) if table.wide[key] else slice(None)]
            for key, each in columns.items()
        }
        if len(since) and resume:
            states[DECAYED] = since
        elif len(since) and decay is not None:
            rows = rows * np.exp(decay - since)[:, None]
        store.put(ids[owned], rows, states if resume else None)


def _record_columns(table: ShardedTable) -> dict[str, list[int]]:
    """First column and the one after the last, of rows and states in records side by side."""
    states = columns_of(table.store.rule, table.width).items()
    return {_ROWS: [0, table.width]} | {key: [columns.start, columns.stop] for key, columns in states}


def _shard_boxes(name: str, table: ShardedTable, store: LivingTable) -> list[Box]:
    """What is kept by shard, of the shards that are here."""
    first, last = table.owned_shards
    return [
        Box(f"table/{name}/{key}", torch.from_numpy(array[first:last].copy()), array.shape, _at(first, array))
        for key, array in store.life.by_shard().items()
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
            read = _read(table, source, at, first, len(ids), wanted, _kept(table, at, names, decay, resume))
            rows, decayed = read.pop("rows"), read.get(DECAYED)
            if decay is not None and decayed is None:  # saved before there was any decay
                read[DECAYED] = decayed = np.zeros(len(wanted))
            if not resume and decay is not None and decayed is not None:
                rows = rows * np.exp(decay - decayed)[:, None]
            try:
                table.store.put(ids[wanted], rows, read if resume else None, step)
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
    table: ShardedTable, source: Source, at: str, first: int, count: int, wanted: np.ndarray, parts: Mapping[str, bool]
) -> dict[str, np.ndarray]:
    """The `wanted` ones of `count` rows from `first` on."""
    left, right = table.store.columns
    return {
        key: source.read(at + key, *(((first, left), (count, right - left)) if wide else ((first,), (count,)))).numpy()[
            wanted
        ]
        for key, wide in parts.items()
    }


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
    for key, array in store.life.by_shard().items():
        if prefix + key in names and last > first:
            array[first:last] = source.read(prefix + key, _at(first, array), (last - first, *array.shape[1:])).numpy()


def _at(first: int, array: np.ndarray) -> tuple[int, ...]:
    return (first, *(0,) * (array.ndim - 1))
