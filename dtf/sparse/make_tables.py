"""Makes the sparse tables of a task as `strategy.tables` says. Imports numba only for recipes that have tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dtf.api.sparse_table import Placement, Placements, Table, placement_of
from dtf.api.strategy import check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.distributed.sharding import bounds, greedy_balance
from dtf.distributed.world import World
from dtf.model.init import DTYPES

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables
    from dtf.sparse.table_layouts import ShardedTable


def table_specs(task: Task) -> dict[str, Table]:
    """The task's tables by name; empty when it has none. ConfigError where nothing says how their rows learn."""
    specs = task.recipe.tables()
    if specs and task.rows is None:
        raise ConfigError(
            f"{type(task.recipe).__name__} has sparse tables, and nothing says how their rows learn; give sparse=NAME"
        )
    return specs


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

    from dtf.sparse.living_table import table_class
    from dtf.sparse.sharded_tables import ShardedTables
    from dtf.sparse.table_layouts import ColumnWiseTable, DataParallelTable, RowWiseTable, TableWiseTable

    flags = torch.zeros(world.size, dtype=torch.int64)
    flags[world.rank] = int(gives)
    givers = [bool(flag) for flag in world.reduce(flags).tolist()]
    kind = np.float64 if DTYPES[task.precision.param] is torch.float64 else np.float32
    check_tables(task, placements, world.size)  # again: elastic launchers change the number of ranks
    chosen = {name: _placement(task, name, placements, world.size) for name in specs}
    whole = {name: spec.width * spec.most_rows for name, spec in specs.items() if chosen[name] is Placement.table_wise}
    owners = greedy_balance(whole, world.size)
    spread: dict[str, ShardedTable] = {}
    for name, spec in specs.items():
        placement = chosen[name]
        columns = bounds(spec.width, world.size, world.rank) if placement is Placement.column_wise else (0, spec.width)
        store = table_class(task.rows)(spec, task.rows, task.seed, name, kind, columns)
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
