"""Makes the sparse tables of a task as `strategy.tables` says. Imports numba only for recipes that have tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dtf.api.sparse_table import Placement, Placements, Table, placement_of
from dtf.api.strategy import check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.distributed.sharding import bounds, greedy_balance
from dtf.distributed.world import World
from dtf.host.memory import available_bytes
from dtf.model.init import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection

    from dtf.sparse.sharded_tables import ShardedTables
    from dtf.sparse.store import SparseTable
    from dtf.sparse.table_layouts import ShardedTable


_BESIDE = 64
"""Bytes of memory for a row beside its numbers, no less than a cache needs."""

_FILTER = 32
"""Bytes of the filter of `sparse.admit_count` for a row that there is room for, no less than it has."""


def table_specs(task: Task) -> dict[str, Table]:
    """The task's tables by name; empty when it has none. ConfigError where nothing says how their rows learn."""
    specs = task.recipe.tables()
    if specs and task.rows is None:
        raise ConfigError(
            f"{type(task.recipe).__name__} has sparse tables, and nothing says how their rows learn; give sparse=NAME"
        )
    return specs


def memory_of(task: Task, here: Collection[str], processes: int = 1) -> dict[str, int]:
    """Bytes of memory for the rows of each table in a process that has those in `here`, where `sparse.disk` has the
    others: tables that need less than an equal part get what they need, the rest have equal parts. ConfigError where
    this host, which has so many `processes` that do so, has less free.
    """
    assert task.rows is not None
    specs, rule, item = table_specs(task), task.rows, DTYPES[task.precision.param].itemsize
    beside = _BESIDE + rule.extra_bytes + _FILTER * (rule.admit_count > 1)
    needs = {name: specs[name].most_rows * (item * rule.record_columns(specs[name].width) + beside) for name in here}
    left, bounds_of = int(rule.memory_gb * 1e9), dict[str, int]()
    for number, name in enumerate(sorted(needs, key=lambda name: needs[name])):
        bounds_of[name] = min(needs[name], left // (len(needs) - number))
        left -= bounds_of[name]
    free, wanted = available_bytes(), processes * sum(bounds_of.values())
    if rule.disk and free is not None and wanted > free:
        raise ConfigError(
            f"sparse.memory_gb={rule.memory_gb:g}: rows may come to take {wanted / 1e9:.3g} GB in the processes of "
            f"this host, which has {free / 1e9:.3g} GB free; give less"
        )
    return bounds_of


def table_of(
    task: Task, name: str, columns: tuple[int, int] | None, memory_bytes: int | None, hashes: tuple[int, int]
) -> SparseTable:
    """An empty table, or these `columns` of one, in one process, as the options of `sparse` say. `memory_bytes`: see
    `memory_of`; None: the process never has a row of it. `hashes`: the least and the largest of the ids that come.
    """
    from dtf.sparse.living_table import table_class
    from dtf.sparse.living_tiered_table import LivingTieredTable
    from dtf.sparse.stored_table import FrozenRows, StoredTable
    from dtf.sparse.tiered_table import TieredTable

    rule, spec = task.rows, task.recipe.tables()[name]
    assert rule is not None
    kind = np.float64 if DTYPES[task.precision.param] is torch.float64 else np.float32
    if memory_bytes is None:
        store = table_class(rule)(replace(spec, capacity=1), rule, task.seed, name, kind, columns)
        store.spec = spec
        return store
    if rule.disk:
        made = LivingTieredTable if rule.lives else TieredTable
        return made(spec, rule, task.seed, name, kind, memory_bytes, hashes)
    if isinstance(rule, FrozenRows):
        return StoredTable(spec, rule, task.seed, name, kind, columns)
    return table_class(rule)(spec, rule, task.seed, name, kind, columns)


def tables_of(
    task: Task, world: World, placements: Placements, gives: bool = True, share: float = 1.0
) -> ShardedTables | None:
    """The task's sparse tables over all ranks; None when it has none. Collective.

    `gives`: whether this rank's gradients count; of several ranks that compute the same rows, one. `share`: the factor
    of each rank's gradients in their sum. ConfigError where nothing says how rows learn, or the tables cannot be
    sharded so.
    """
    specs = table_specs(task)
    if not specs:
        return None
    assert task.rows is not None

    from dtf.sparse.sharded_tables import ShardedTables
    from dtf.sparse.table_layouts import ColumnWiseTable, DataParallelTable, RowWiseTable, TableWiseTable, owned_hashes

    flags = torch.zeros(world.size, dtype=torch.int64)
    flags[world.rank] = int(gives)
    givers = [bool(flag) for flag in world.reduce(flags).tolist()]
    check_tables(task, placements, world.size)  # again: elastic launchers change the number of ranks
    chosen = {name: _placement(task, name, placements, world.size) for name in specs}
    whole = {name: spec.width * spec.most_rows for name, spec in specs.items() if chosen[name] is Placement.table_wise}
    owners = greedy_balance(whole, world.size)
    here = [name for name in specs if name not in whole or name in owners[world.rank]]
    memory = memory_of(task, here, world.place.local_size)
    spread: dict[str, ShardedTable] = {}
    for name, spec in specs.items():
        placement = chosen[name]
        columns = bounds(spec.width, world.size, world.rank) if placement is Placement.column_wise else (0, spec.width)
        divided = (world.size, world.rank) if placement is Placement.row_wise else (1, 0)
        hashes = owned_hashes(*divided, task.rows.shards(spec))
        store = table_of(task, name, columns, memory.get(name), hashes)
        match placement:
            case Placement.replicated:
                spread[name] = DataParallelTable(store, world, givers)
            case Placement.row_wise:
                spread[name] = RowWiseTable(store, world, givers)
            case Placement.column_wise:
                spread[name] = ColumnWiseTable(store, world, givers)
            case Placement.table_wise:
                spread[name] = TableWiseTable(
                    store, world, givers, next(rank for rank, names in enumerate(owners) if name in names)
                )
            case Placement.auto:
                raise AssertionError(name)
    tables = ShardedTables(spread, world, share, task.recipe.clicks)
    if task.weights is not None:
        tables.start_from(task.weights, task.recipe)
    return tables


def _placement(task: Task, name: str, placements: Placements, ranks: int) -> Placement:
    """How one table lies on so many ranks."""
    if ranks == 1:
        return Placement.replicated
    placement = placement_of(placements, name)
    return task.placements.get(name, Placement.row_wise) if placement is Placement.auto else placement
