"""Strategies with one planted fault each, to prove that `job=verify` can fail. A plugin: `plugins=[tests.faults]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.registry import register
from dtf.strategies.ddp import Ddp
from dtf.strategy import Program, Task
from dtf.values import Shard

if TYPE_CHECKING:
    from dtf.world import World


def _ddp(strategy: Ddp, task: Task, world: World) -> Any:
    """ddp's own program, whose insides are then damaged."""
    return Ddp.setup(strategy, task, world)


@register("strategy", "wrong_scale")
class WrongScale(Ddp):
    """The gradient is not divided by the number of ranks: twice as large on two of them."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program._factor *= world.size
        return program


@register("strategy", "skipped_all_reduce")
class SkippedAllReduce(Ddp):
    """Every rank keeps its own gradient."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program._replica._forward = program._replica.model
        return program


@register("strategy", "swapped_batch")
class SwappedBatch(Ddp):
    """Ranks read each other's rows."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program.shard = Shard(world.size - 1 - world.rank, world.size)
        return program


@register("strategy", "lost_rows")
class LostRows(Ddp):
    """All ranks read the first one's rows."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program.shard = Shard(0, world.size)
        return program


@register("strategy", "stale_average")
class StaleAverage(Ddp):
    """Running statistics are not averaged over ranks before they are saved."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program.settle = lambda: None
        return program
