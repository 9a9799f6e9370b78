"""All sparse tables of a run over its ranks: rows replace ids before a step, gradients go to the rank that holds the
rows after it. Checkpoints of tables are written and read here.

A table lies in host memory. How one table lies on ranks is `dtf.sparse.table_layouts`; how it keeps and updates its
rows is `dtf.sparse.store`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Recipe
from dtf.api.sparse_table import Table
from dtf.api.task import Source, Weights
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Box
from dtf.distributed.world import World
from dtf.sparse.living_table import LivingTable
from dtf.sparse.store import SparseTable, full
from dtf.sparse.stored_table import FrozenRows
from dtf.sparse.table_checkpoints import boxes_on, load_table
from dtf.sparse.table_inputs import TableInputs
from dtf.sparse.table_layouts import ShardedTable

if TYPE_CHECKING:
    from dtf.sparse.disk.saved_rows import RowsSetAside

LIFE_COUNTS = ("admitted", "refused", "evicted")
"""What is counted of rows that have a life, see `Life`."""

Clicks = Callable[[Any], Tensor | None]
"""See `Recipe.clicks`."""


class ShardedTables:
    """The sparse tables of a run on one rank.

    A step calls `lookup` for training, `backward` and `apply`, in this order. After `backward`, `norm` is the norm of
    the gradient of all rows over all ranks. All methods are collective, but for `specs`, `clear`, `learnt` and
    `planned_bytes`.

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
                raise full(name, table.store.spec, int(rows))
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
        return [box for name, table in self._tables.items() for box in boxes_on(name, table, self._world, layer)]

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
            load_table(name, table, source, resume)

    def start_from(self, weights: Weights, recipe: Recipe) -> None:
        """Begin with the rows of another run; where nothing learns, with rows and decay as that run has them.
        ConfigError for weights of other programs, which have no tables.
        """
        source = weights.source()
        if source is None:
            raise ConfigError(
                f"{weights.place} holds no sparse tables, and {type(recipe).__name__} has some; give a run or a "
                "checkpoint of dtf"
            )
        self.load(source, resume=all(isinstance(table.store.rule, FrozenRows) for table in self._tables.values()))

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
        kept = kept or _all_ids
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

    def planned_bytes(self) -> int:
        """Bytes of all rows and their optimizer state on this rank; of tables on disk what they may take of its memory.
        Not collective.
        """
        return sum(table.store.planned_bytes() for table in self._tables.values())


def _all_ids(store: SparseTable) -> np.ndarray:
    return np.sort(np.concatenate([np.empty(0, np.int64), *(some.ids for some in store.scan())]))


def _ids_in(batch: Batch, name: str, table: ShardedTable) -> TableInputs:
    """What a batch has for a table."""
    spec = table.store.spec
    return TableInputs(batch.inputs, spec.inputs or (name,), spec.pooling)
