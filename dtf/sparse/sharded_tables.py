"""All sparse tables of a run over its ranks: rows replace ids before a step, gradients go to the rank that holds the
rows after it. Checkpoints of tables are written and read here.

A table lies in host memory. How one table lies on ranks is `dtf.sparse.table_layouts`; how it keeps and updates its
rows is `dtf.sparse.store`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

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
from dtf.sparse.store import DECAYED, full
from dtf.sparse.table_inputs import TableInputs
from dtf.sparse.table_layouts import ShardedTable

COUNT, DECAY = "count", "decay"
"""In a checkpoint: rows over all ranks; `SparseTable.decayed`."""

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
        self._seen: dict[str, np.ndarray] = {}  # of tables whose rows have a life, for ids of `_asked`
        self._told = dict.fromkeys(LIFE_COUNTS, 0)
        self.norm = torch.zeros((), dtype=torch.float64)

    def lookup(self, batch: Batch, train: bool) -> Batch:
        """The batch with rows (B, F, width) in place of ids (B, F), pooled ones in place of Bags. With `train`, rows
        that do not exist are made. Collective.
        """
        inputs = dict(batch.inputs)
        for name, table in self._tables.items():
            spec = table.store.spec
            asked = TableInputs(batch.inputs, spec.inputs or (name,), spec.pooling)
            inputs |= asked.rows(table.lookup(asked.distinct, train))
            if train:
                self._asked[name] = asked
                if table.lives:
                    self._seen[name] = asked.seen(batch, self._clicks).astype(table.store.dtype)
        return batch._replace(inputs=inputs)

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

    def boxes(self) -> list[Box]:
        """This rank's part of the tables, for a checkpoint. Collective."""
        return [box for name, table in self._tables.items() for box in _boxes(name, table, self._world)]

    def load(self, source: Source, resume: bool = True) -> None:
        """Take this rank's part from a checkpoint. `resume=False`: only the rows, as an evaluation sees them, for
        another run. DataError where the checkpoint has no such table.
        """
        for name, table in self._tables.items():
            prefix, store = f"table/{name}/", table.store
            count, names = int(source.read(f"{prefix}{COUNT}")), source.names()
            decay = float(source.read(f"{prefix}{DECAY}")) if f"{prefix}{DECAYED}" in names else None
            parts = {"rows": True, **(table.wide if resume else {}), **({DECAYED: False} if decay is not None else {})}
            parts |= {key: False for key in store.statistics if resume and f"{prefix}{key}" in names}
            step = source.scalars.get("program", source.scalars).get("table_steps", 0) if resume else 0
            if resume and isinstance(store, LivingTable):
                _load_shards(prefix, table, store, source, names)
            if resume and decay is not None:
                store.decayed = decay
            all_ids = source.read(f"{prefix}ids").numpy() if count else np.empty(0, np.int64)
            if len(all_ids) != count:
                raise DataError(
                    f"{source.place}: table {name} has {count} rows by its own count, and ids of {len(all_ids)}"
                )
            first, last = store.columns
            for at in range(0, count, ROWS_PER_READ):
                ids = all_ids[at : at + ROWS_PER_READ]
                size, owned = len(ids), table.owns(ids)
                read = {
                    key: source.read(
                        prefix + key, *(((at, first), (size, last - first)) if wide else ((at,), (size,)))
                    ).numpy()[owned]
                    for key, wide in parts.items()
                }
                rows = read.pop("rows")
                if not resume and decay is not None:
                    rows = rows * np.exp(decay - read.pop(DECAYED))[:, None]
                try:
                    store.put(ids[owned], rows, read if resume else None, step)
                except DataError as error:
                    raise DataError(f"{source.place}: {error}") from error

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

    def learnt(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> ascending ids (n,) and rows (n, width) that this rank holds, as evaluation sees them. Copies.

        Not collective.
        """
        ids_of = {name: table.store.export().ids for name, table in self._tables.items()}
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


def _boxes(name: str, table: ShardedTable, world: World) -> list[Box]:
    """Ids, rows and their state, as this rank holds them: after those of the ranks before it, where ranks hold
    different rows.
    """
    counts = torch.zeros(world.size, dtype=torch.int64)
    counts[world.rank] = len(table.store)
    if table.by_rows:
        world.reduce(counts)
    elif world.rank and not table.by_columns:
        return []  # the first rank has the same
    before, total = (int(counts[: world.rank].sum()), int(counts.sum())) if table.by_rows else (0, len(table.store))
    return boxes_of(name, table, world.rank == 0, before, total)


def boxes_of(name: str, table: ShardedTable, first: bool, before: int, total: int) -> list[Box]:
    """One part of a table, of `total` rows in all parts of which `before` come first.

    `first`: whether it also tells what all parts have alike.
    """
    ids, rows, states = table.store.export()
    boxes = [Box(f"table/{name}/{COUNT}", torch.tensor(total), (), ())] if first else []
    if first and DECAYED in states:
        boxes.append(Box(f"table/{name}/{DECAY}", torch.tensor(table.store.decayed, dtype=torch.float64), (), ()))
    for key, array in {"ids": ids, "rows": rows, **states}.items():
        if key == "rows" or table.wide.get(key):
            part = torch.from_numpy(array.reshape(len(ids), table.store.width))
            boxes.append(Box(f"table/{name}/{key}", part, (total, table.width), (before, table.store.columns[0])))
        elif first or table.by_rows:
            boxes.append(Box(f"table/{name}/{key}", torch.from_numpy(array), (total,), (before,)))
    if isinstance(table.store, LivingTable) and (first or table.by_rows):
        boxes += _shard_boxes(name, table, table.store)
    return boxes


def _shard_boxes(name: str, table: ShardedTable, store: LivingTable) -> list[Box]:
    """What is kept by shard, of the shards that are here."""
    first, last = table.owned_shards
    return [
        Box(f"table/{name}/{key}", torch.from_numpy(array[first:last].copy()), array.shape, _at(first, array))
        for key, array in store.life.by_shard().items()
    ]


def _load_shards(prefix: str, table: ShardedTable, store: LivingTable, source: Source, names: Container[str]) -> None:
    first, last = table.owned_shards
    for key, array in store.life.by_shard().items():
        if prefix + key in names and last > first:
            array[first:last] = source.read(prefix + key, _at(first, array), (last - first, *array.shape[1:])).numpy()


def _at(first: int, array: np.ndarray) -> tuple[int, ...]:
    return (first, *(0,) * (array.ndim - 1))
