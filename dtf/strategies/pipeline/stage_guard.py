"""The guard of pipelines: it compares those that compute other rows, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dtf.api.guard import Guard
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.core.types import Batch, Evaluated, Train
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.world import World
from dtf.model.receive import Receiver
from dtf.optim.update import LocalUpdate
from dtf.strategies.guard.replica_guard import Copy, ReplicaGuard
from dtf.strategies.guard.rows import RowsToAll
from dtf.strategies.guard.spmd_guard import alike_buffers, rows_of_micro_batch
from dtf.strategies.guard.witness import GradientWitness, Witness
from dtf.strategies.pipeline.stage import Stage, local_parameters
from dtf.strategies.trial_numbers import passes_without_trace

Run = Callable[[Batch, Train, Callable[[Stage, int], None]], Evaluated]


def stage_guard(
    stages: Sequence[Stage],
    run: Run,
    update: LocalUpdate,
    program: Program,
    task: Task,
    world: World,
    dims: ParallelDims,
) -> Guard:
    """`run`: forward and backward of one micro-batch with the factor of a step, with what to call before each pass of
    a stage. Collective.
    """
    models = [stage.model for stage in stages]
    witness = Witness([GradientWitness(stage.model.parameters(), stage.masks) for stage in stages])
    rows_to_all = RowsToAll(dims.row_group, world.device, dims.reads or dims.sizes.layer_ranks > 1)
    receiver = Receiver(task)

    def held() -> Mapping[str, Mapping[str, Tensor]]:
        place = f"in slice {dims.layer_rank}.{dims.place['shard']}"
        parts = {f"stage {s.index} {place}": {**local_parameters(s.model), **alike_buffers(s)} for s in stages}
        return parts | {f"updated by rank {dims.place['pipeline']} {place}": update.updated_here()}

    def again(rows: Batch, ticket: Train, number: int) -> Tensor:
        def enter(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(ticket.step, number)

        part = receiver.train(rows, ticket.step, number)
        with passes_without_trace(models, task.recipe):
            for stage in stages:
                stage.train()
                stage.changing.begin()
            sums = run(part, ticket, enter).sums
            for stage in stages:
                stage.changing.begin_micro_batch()
                for parameter in stage.model.parameters():
                    parameter.grad = None
        return sums

    def rows(ticket: Train, batch: Batch, number: int, owner: int) -> Sequence[Batch]:
        own = rows_of_micro_batch(ticket, batch, number, dims.dp_shard, program.micro_batch_rows)
        return [rows_to_all(own if dims.dp_shard.index == owner else None, owner)]

    compute = task.precision.compute
    copies = [Copy(held, again, witness)]
    return ReplicaGuard(
        copies, dims.mesh_rows, program.micro_batch_rows, compute, world.device, world, rows, program.step
    )
