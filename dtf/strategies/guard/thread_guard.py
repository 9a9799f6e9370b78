"""The guard of replicas that threads of one process run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dtf.api.guard import Guard
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.core.types import Batch, Train
from dtf.data.batches import micro_batch_bounds
from dtf.distributed.world import World
from dtf.optim.update import LocalUpdate
from dtf.strategies.guard.replica_guard import Copy, ReplicaGuard
from dtf.strategies.guard.rows import copy_in_place
from dtf.strategies.guard.spmd_guard import alike_buffers
from dtf.strategies.guard.witness import GradientWitness, Witness
from dtf.strategies.replica import Replica


def thread_guard(
    replicas: Sequence[Replica],
    updates: Sequence[LocalUpdate],
    factor: Callable[[Train, int], Tensor],
    part: Callable[[Batch, int, int, int], Batch],
    each: Callable[[Callable[[int], Any]], list[Any]],
    program: Program,
    task: Task,
    world: World,
) -> Guard:
    """`factor(ticket, i)`: of the sum of losses over the rows of a step, for replica i. `part(batch, first, last, i)`:
    rows on its device. `each`: see ReplicaGuard.
    """

    def copy(replica: Replica, update: LocalUpdate, i: int) -> Copy:
        def held() -> Mapping[str, Mapping[str, Tensor]]:
            return {
                "model": {**dict(replica.model.named_parameters()), **alike_buffers(replica)},
                "updated": update.updated_here(),
            }

        def again(rows: Batch, ticket: Train, number: int) -> Tensor:
            return replica.again(rows, ticket.step, number, factor(ticket, i))

        return Copy(held, again, Witness([GradientWitness(replica.model.parameters(), replica.masks)]))

    def rows(ticket: Train, batch: Batch, number: int, owner: int) -> Sequence[Batch]:
        bounds = micro_batch_bounds(ticket.rows, program.micro_batch_rows)
        return [copy_in_place(part(batch, bounds[number], bounds[number + 1], i)) for i in range(len(replicas))]

    copies = [copy(*pair, i) for i, pair in enumerate(zip(replicas, updates, strict=True))]
    shares = [[i] for i in range(len(replicas))]
    compute = task.precision.compute
    return ReplicaGuard(
        copies, shares, program.micro_batch_rows, compute, world.device, world, rows, program.step, each
    )
