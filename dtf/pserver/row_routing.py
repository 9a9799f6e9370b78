"""Rows of sparse tables between trainers, which look them up by id, and servers, each of which holds those that a hash
of the id gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtf.api.sparse_table import Pooling
from dtf.api.task import Task
from dtf.core.types import Batch, Box
from dtf.distributed.world import World
from dtf.sparse.id_arrays import segment_sum, squares, unique
from dtf.sparse.living_table import LivingTable
from dtf.sparse.make_tables import memory_of, table_of, table_specs
from dtf.sparse.sharded_tables import LIFE_COUNTS, Clicks, ShardedTables
from dtf.sparse.store import SparseTable, full
from dtf.sparse.table_checkpoints import PartSizes, boxes_of, part_sizes
from dtf.sparse.table_inputs import TableInputs
from dtf.sparse.table_layouts import Gradients, RowWiseTable, owned_hashes, owner_of


class RowGradients(NamedTuple):
    """Gradients of rows from one trainer, summed by id, and what they count in the sum over trainers."""

    ids: np.ndarray  # (U,) distinct
    gradients: np.ndarray  # (U, width)
    seen: np.ndarray | None = None  # (U, 2) where rows have a life, see `SparseTable.update`
    weight: float = 1.0


class ServerShard(RowWiseTable):
    """One server's part of a table."""

    def __init__(self, store: SparseTable, world: World) -> None:
        super().__init__(store, world, [True] * world.size)

    def merge(self, pushes: Sequence[RowGradients]) -> float:
        """The gradients to apply: their sum, in this order; returns the sum of its squares."""
        parts = [
            part.gradients if part.weight == 1 else part.gradients * part.gradients.dtype.type(part.weight)
            for part in pushes
        ]
        seen = [part.seen for part in pushes if part.seen is not None] if self.lives else []
        if len(parts) == 1:
            self._merged = Gradients(pushes[0].ids, parts[0], seen[0] if seen else None)
        else:
            ids, inverse = (
                unique(np.concatenate([part.ids for part in pushes]))
                if pushes
                else (np.empty(0, np.int64), np.empty(0, np.int32))
            )
            summed = (
                segment_sum(np.concatenate(parts), inverse, len(ids))
                if pushes
                else np.empty((0, self.width), self.store.dtype)
            )
            shown = segment_sum(np.concatenate([np.empty((0, 2)), *seen]), inverse, len(ids)) if self.lives else None
            self._merged = Gradients(ids, summed, shown)
        return squares(self._merged.gradients)


class ServerShards(ShardedTables):
    """The parts of all tables on one server, as its updates step and save them."""

    def __init__(self, tables: Mapping[str, ServerShard], world: World) -> None:
        super().__init__(tables, world, 1.0)
        self._shards = dict(tables)
        self.lives = any(shard.lives for shard in tables.values())

    def rows(self, name: str, ids: np.ndarray, create: bool) -> np.ndarray:
        """Rows (U, width) of distinct ids (U,) of this server. Errors as of `SparseTable.lookup`. Not collective."""
        return self._shards[name].store.lookup(ids, create)

    def merge(self, pushes: Mapping[str, Sequence[RowGradients]], collective: bool) -> float:
        """Merge gradients for the next `apply`; returns the sum of squares of the result.

        `collective`: all servers merge parts of the same gradient at once, whose norm is then known.
        """
        total = torch.zeros(1 + len(self._shards), dtype=torch.float64)
        for name, table_shard in self._shards.items():
            total[0] += table_shard.merge(pushes[name])
        total[1:] = self._counts()
        if collective:
            self._world.reduce(total)
        self._check(total[1:])
        self.norm = total[0].sqrt()
        return float(total[0])

    def refuse_overfull(self) -> None:
        """Raise the error of a table of which all servers together hold more rows than its capacity. Collective."""
        self._check(self._world.reduce(self._counts()))

    def _counts(self) -> Tensor:
        return torch.tensor([len(table_shard.store) for table_shard in self._shards.values()], dtype=torch.float64)

    def _check(self, counts: Tensor) -> None:
        for (name, table_shard), rows in zip(self._shards.items(), counts.tolist(), strict=True):
            if rows > table_shard.store.spec.capacity:
                raise full(name, table_shard.store.spec, int(rows))

    def records(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows of distinct ids with their state, made where there are none; see `SparseTable.records`.

        Not collective.
        """
        return self._shards[name].store.records(ids)

    def add_changes(self, pushes: Mapping[str, Sequence[RowGradients]]) -> None:
        """Add changes of rows and their states, each times its weight. Not collective."""
        for name, table_shard in self._shards.items():
            for part in pushes[name]:
                table_shard.store.add(part.ids, part.gradients * part.gradients.dtype.type(part.weight))

    def part_sizes(self, layer: int | None) -> np.ndarray:
        """The PartSizes of each table here, (tables, 3) int64. Not collective."""
        return np.array([part_sizes(table_shard.store, layer) for table_shard in self._shards.values()], np.int64)

    def parts(self, before: np.ndarray, total: np.ndarray, layer: int | None) -> list[Box]:
        """As `boxes`, where the PartSizes of the servers before this one are known, and those of all: (tables, 3). Not
        collective.
        """
        places = zip(*([PartSizes(*sizes) for sizes in part.tolist()] for part in (before, total)), strict=True)
        return [
            box
            for (name, table_shard), (ahead, whole) in zip(self._shards.items(), places, strict=True)
            for box in boxes_of(name, table_shard, self._world.rank == 0, ahead, whole, layer)
            if box.tensor.numel()
        ]

    def columns(self, name: str) -> int:
        """How many numbers a row has with its state."""
        return self._shards[name].store.stride

    def life_so_far(self) -> np.ndarray:
        """The LIFE_COUNTS of this server since its tables were made or loaded, over all tables; (3,) int64."""
        lives = [shard.store.life for shard in self._shards.values() if isinstance(shard.store, LivingTable)]
        return np.array([sum(getattr(life, key) for life in lives) for key in LIFE_COUNTS], np.int64)

    def owns(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Which of the ids (n,) belong to this server, bool (n,)."""
        return self._shards[name].owns(ids)

    def sizes(self) -> dict[str, dict[str, int]]:
        """Per table, on this server: see `ServerState.tables`. Not collective."""
        return {name: table_shard.store.about() for name, table_shard in self._shards.items()}


def server_shards(task: Task, world: World) -> ServerShards | None:
    """This server's parts of the task's tables; None where it has none."""
    specs = table_specs(task)
    if not specs:
        return None
    assert task.rows is not None
    memory = memory_of(task, specs)
    shards = ServerShards(
        {
            name: ServerShard(
                table_of(task, name, None, memory[name], owned_hashes(world.size, world.rank, task.rows.shards(spec))),
                world,
            )
            for name, spec in specs.items()
        },
        world,
    )
    if task.weights is not None:
        shards.start_from(task.weights, task.recipe)
    return shards


class RoutedTable(NamedTuple):
    """What a trainer has to know of a table."""

    width: int
    shards: int  # virtual ones, of which each server owns some
    lives: bool  # whether servers are told how often ids were shown
    inputs: tuple[str, ...]  # see `Table.inputs`; never empty
    pooling: Pooling | None


def routed_tables(task: Task) -> dict[str, RoutedTable]:
    """The task's tables by name, as a trainer knows them."""
    rule = task.rows
    return {
        name: RoutedTable(spec.width, rule.shards(spec), rule.lives, spec.inputs or (name,), spec.pooling)
        for name, spec in task.recipe.tables().items()
        if rule is not None
    }


Places = np.ndarray | slice
"""Of some elements of an array."""

ALL = slice(None)


class RowRequest:
    """The ids of one batch, each once and by the server that owns it; routes rows to the batch, and gradients back.

    A table's ids may lie in several inputs, and in Bags, see `Table`.
    """

    def __init__(
        self,
        batch: Batch,
        tables: Mapping[str, RoutedTable],
        servers: int,
        clicks: Clicks | None = None,
        seen: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """`clicks`: see `Recipe.clicks`. `seen`: where the batch does not tell how often its ids were shown, (n, 2)."""
        self._widths, self._servers = {name: table.width for name, table in tables.items()}, servers
        # ids, and the places of the distinct ones by server
        self._by_table: dict[str, tuple[TableInputs, list[Places]]] = {}
        self.seen: dict[str, np.ndarray] = {}
        """How often each distinct id was shown, and clicked: (U, 2), of tables whose rows have a life."""
        for name, table in tables.items():
            asked = TableInputs(batch.inputs, table.inputs, table.pooling)
            self._by_table[name] = asked, _places(asked.distinct, servers, table.shards)
            if table.lives:
                self.seen[name] = asked.seen(batch, clicks) if seen is None else asked.summed(seen[name])

    def ids(self, server: int) -> dict[str, np.ndarray]:
        """The ids that this server is asked for, by table."""
        return {name: asked.distinct[places[server]] for name, (asked, places) in self._by_table.items()}

    def seen_of(self, server: int) -> dict[str, np.ndarray]:
        """How often each of these ids was shown, and clicked: (U, 2), of tables whose rows have a life."""
        return {name: seen[self._by_table[name][1][server]] for name, seen in self.seen.items()}

    def fill(self, batch: Batch, rows: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> Batch:
        """The batch with rows in place of ids. `rows`: by server, of what it was asked for."""
        if not self._by_table:
            return batch
        inputs = dict(batch.inputs)
        for name, (asked, places) in self._by_table.items():
            if places[0] is ALL:
                distinct_rows = rows[0][name]
            else:
                distinct_rows = np.zeros((len(asked.distinct), self._widths[name]), rows[0][name].dtype)
                for place, part in zip(places, rows, strict=True):
                    distinct_rows[place] = part[name]
            inputs |= {key: value.to(device) for key, value in asked.rows(distinct_rows).items()}
        return batch._replace(inputs=inputs)

    def gradients(self, gradients: Mapping[str, Tensor]) -> list[dict[str, RowGradients]]:
        """By server and table, the ids and the summed gradients (U, width) of their rows, from those of `fill`'s
        inputs.
        """
        parts: list[dict[str, RowGradients]] = [{} for _ in range(self._servers)]
        for name, (asked, places) in self._by_table.items():
            seen = self.seen.get(name)
            # what was shown counts, also where it has no gradient
            if seen is not None or any(key in gradients for key in asked.names):
                ids, summed = asked.distinct, asked.gradients(gradients, self._widths[name])
                for part, place in zip(parts, places, strict=True):
                    part[name] = RowGradients(ids[place], summed[place], None if seen is None else seen[place])
        return parts


def _places(ids: np.ndarray, servers: int, shards: int) -> list[Places]:
    """Places of distinct ids by the server that owns them. The id -1 stands for zeros, and no server owns it."""
    real = ids != -1
    if servers == 1:
        return [ALL if real.all() else np.flatnonzero(real)]
    owners = owner_of(ids, servers, shards)
    owners[~real] = -1
    return [np.flatnonzero(owners == server) for server in range(servers)]
