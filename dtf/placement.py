"""Where the rows of sparse tables lie. Imports what keeps them only for recipes that have some."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from dtf.build import DTYPES
from dtf.errors import ConfigError
from dtf.strategy import Task
from dtf.world import World

if TYPE_CHECKING:
    from dtf.tables import Tables


class Placement(Enum):
    """Who holds a table's rows."""

    replicated = "replicated"  # every rank all of them
    rows = "rows"  # each rank those whose id it owns


def tables_of(task: Task, world: World, placement: Placement, gives: bool = True, share: float = 1.0) -> Tables | None:
    """The task's sparse tables over all ranks; None when it has none. Collective.

    `gives`: whether this rank's gradients count: of several ranks that compute the same rows, one. `share`: the factor of ranks' gradients in their sum.
    """
    specs = task.recipe.tables()
    if not specs:
        return None
    if task.step.ema:
        raise ConfigError("step.ema averages all weights, and the rows of a sparse table are too many for that; use step.ema=0, or a dense table")
    if task.rule is None:
        raise ConfigError(f"{type(task.recipe).__name__} has sparse tables, and nothing says how their rows learn; give sparse=NAME")

    from dtf.sparse import SparseTable
    from dtf.tables import Dealt, Everywhere, Tables

    flags = torch.zeros(world.size, dtype=torch.int64)
    flags[world.rank] = int(gives)
    givers = [bool(flag) for flag in world.reduce(flags).tolist()]
    spread = Everywhere if placement is Placement.replicated or world.size == 1 else Dealt
    kind = "float64" if DTYPES[task.precision.param] is torch.float64 else "float32"
    stores = {name: SparseTable(spec, task.rule, task.seed, name, kind) for name, spec in specs.items()}
    tables = Tables({name: spread(store, world, givers) for name, store in stores.items()}, world, share)
    source = task.weights.source() if task.weights is not None else None
    if source is not None:
        tables.load(source)
    return tables
