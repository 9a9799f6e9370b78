"""`strategy.tables=auto`: measures how training uses the sparse tables, and has all ranks take one plan."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from dtf.api.sparse_table import Placement, placement_of
from dtf.api.strategy import Strategy
from dtf.api.task import Task
from dtf.core.types import WHOLE
from dtf.data.batches import Epochs
from dtf.data.splits import Splits
from dtf.distributed.world import World
from dtf.host.memory import available_bytes
from dtf.model.init import DTYPES
from dtf.model.receive import Receiver
from dtf.sparse.table_planner import TablePlan, measure, plan_tables

BATCHES = 4
"""Global batches whose ids are looked at, spread over the first epoch."""

ROOM = 0.5
"""Share of the memory that a host has free for tables of which each of its ranks holds all rows."""


def table_plan(task: Task, strategy: Strategy, splits: Splits, epochs: Epochs, world: World) -> dict[str, TablePlan]:
    """How each sparse table of the task is sharded, the same on all ranks. Empty where that is not `auto`, without
    tables, and on one rank.

    Rank 0 reads a few global batches. A run that goes on with as many ranks keeps the plan of its start, where its
    record of that fits; numbers do not depend on it. Collective.
    """
    chosen, rule = getattr(strategy, "tables", Placement.replicated), task.rows
    tables = {
        name: table for name, table in task.recipe.tables().items() if placement_of(chosen, name) is Placement.auto
    }
    if not tables or rule is None or world.size == 1:
        return {}
    plans, key = task.start_check.plans, f"sparse tables on {world.size} ranks"
    free = available_bytes()
    room = world.gather(-1 if free is None else free // max(1, world.place.local_size))
    text = plans.get(key)
    if world.rank == 0 and text is None:
        least = min(room or [-1])
        batches = (_inputs(task, splits, epochs, index) for index in _spread(epochs.batches))
        uses = measure(batches, tables, rule, world.size)
        item = 8 if DTYPES[task.precision.param] is torch.float64 else 4
        found = plan_tables(tables, rule, uses, world.size, item, None if least < 0 else int(ROOM * least))
        text = json.dumps({name: [plan.placement.value, plan.reason] for name, plan in found.items()})
    plans[key] = text = world.broadcast(text)
    return {name: TablePlan(Placement(value), reason) for name, (value, reason) in json.loads(text).items()}


def _spread(batches: int) -> list[int]:
    return np.unique(np.arange(BATCHES) * batches // BATCHES).tolist()


def _inputs(task: Task, splits: Splits, epochs: Epochs, index: int) -> Any:
    """The inputs of a global batch, as tables look them up."""
    loader = splits.loader("train", WHOLE, task.step.batch_size)
    try:
        with torch.random.fork_rng(devices=[]):
            return Receiver(task).train(loader.rows(epochs.ids(0, index), 0), 0, 0).inputs
    finally:
        loader.close()


def placements(plans: dict[str, TablePlan]) -> dict[str, Placement]:
    """As `Task.placements`."""
    return {name: plan.placement for name, plan in plans.items()}


def table_plan_row(plans: dict[str, TablePlan]) -> dict[str, str]:
    """For the start-up table: how tables are sharded, and why."""
    texts = [f"{name}: {plan.placement.value}, {plan.reason}" for name, plan in plans.items()]
    return {"table plan": "; ".join(texts)} if texts else {}
