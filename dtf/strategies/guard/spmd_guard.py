"""The guard of programs in which every rank runs the whole model, or its part of each layer, on its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dtf.api.guard import Guard
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.core.types import Batch, Shard, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.world import World
from dtf.model.forward import rows_of
from dtf.optim.update import LocalUpdate
from dtf.strategies.buffers import Part
from dtf.strategies.guard.replica_guard import Copy, ReplicaGuard
from dtf.strategies.guard.rows import RowsToAll
from dtf.strategies.guard.witness import GradientWitness, Witness
from dtf.strategies.replica import Replica
from dtf.strategies.replica_digests import whole_and_slices


def spmd_guard(
    replica: Replica,
    update: LocalUpdate,
    dims: ParallelDims | None,
    program: Program,
    task: Task,
    world: World,
    factor: Tensor,
) -> Guard:
    """Compares the ranks of a `Spmd`. `factor`: of the sum of losses over the rows of a step. Collective."""
    share = dims.dp_shard if dims else Shard(world.rank, world.size)
    group = dims.row_group if dims else dist.group.WORLD
    assert group is not None
    witness = Witness([GradientWitness(_parameters(replica), replica.masks)])
    rows_to_all = RowsToAll(group, world.device)

    def held() -> Mapping[str, Mapping[str, Tensor]]:
        place = f"part {dims.layer_rank}" if dims else "model"
        parts = [*whole_and_slices(update.held()), *whole_and_slices(update.updated_here())]
        return {f"{i} {part.name}": part.tensors for i, part in enumerate(parts)} | {place: alike_buffers(replica)}

    def again(rows: Batch, ticket: Train, number: int) -> Tensor:
        return replica.again(rows, ticket.step, number, update.scale(factor / ticket.rows))

    def rows(ticket: Train, batch: Batch, number: int, owner: int) -> Sequence[Batch]:
        own = rows_of_micro_batch(ticket, batch, number, share, program.micro_batch_rows)
        return [rows_to_all(own if share.index == owner else None, owner)]

    shares = dims.mesh_rows if dims else [[rank] for rank in range(world.size)]
    copies = [Copy(held, again, witness)]
    rows_each, compute = program.micro_batch_rows, task.precision.compute
    return ReplicaGuard(copies, shares, rows_each, compute, world.device, world, rows, program.step)


def rows_of_micro_batch(ticket: Train, batch: Batch, number: int, share: Shard, micro_batch_rows: int) -> Batch:
    """The rows of a micro-batch, from those of the share that computes it; of another share any."""
    bounds = micro_batch_bounds(ticket.rows, micro_batch_rows)
    begin = bounds[micro_batches_of(len(bounds) - 1, share)[0]]
    return rows_of(batch, bounds[number] - begin, bounds[number + 1] - begin)


def alike_buffers(part: Part) -> dict[str, Tensor]:
    """The buffers that all replicas have alike between two steps. Running averages are each replica's own."""
    own = {*part.statistics.names(), *part.scratch}
    return {name: buffer for name, buffer in part.model.named_buffers() if name not in own}


def _parameters(replica: Replica) -> list[Tensor]:
    """The tensors of which passes compute gradients. Collective under FSDP: they are what it gathers into."""
    units = [module for module in replica.model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    found: list[Tensor] = [*replica.model.parameters()]
    for unit in units:
        unit.reshard()
    return found
