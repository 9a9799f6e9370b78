"""How fsdp divides a model: slices here, and nothing gathered that is out of date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dtf.distributed.collectives import waiting_group
from dtf.distributed.world import World
from dtf.host.waits import Operation
from dtf.optim.sharding import Sharding
from dtf.sparse.sharded_tables import ShardedTables
from dtf.strategies.sharded_init import param_shards


def drop_gathered(model: nn.Module) -> None:
    """Drop the whole parameters that are gathered at the moment, or on their way: a pass that left a module out, or
    used another one first, has not taken what was gathered ahead for it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                group.wait_for_unshard()  # does nothing where nothing is on its way
            module.reshard()


def _groups(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
    if groups is None:
        groups = [state._fsdp_param_group]
    return (group for group in groups if group is not None)


def fsdp_sharding(
    world: World, mesh: DeviceMesh, model: nn.Module, masters: dict[str, Tensor], tables: ShardedTables | None
) -> tuple[Sharding, Callable[[], None]]:
    """What this rank has of a sharded model; and a function from whose call on gradients are summed over ranks in place
    of averaged.
    """
    group = mesh["shard"].get_group()
    adding = Operation("the sum of gradient norms", waiting_group(group, "shards"))

    def sum_slices(sums: Tensor) -> Tensor:
        """Sum over the ranks that hold the slices of one copy, in place. Collective."""
        with adding:
            dist.all_reduce(sums, group=group)
        return sums

    params = param_shards(model, masters, first=mesh["shard"].get_local_rank() == 0)
    trained = [shard for shard in params.values() if shard.parameter.requires_grad]
    scale = [1.0]

    def to_sum() -> None:
        scale[0] = float(world.size)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    scalars = [i for i, shard in enumerate(trained) if not shard.shape]

    def average_scalars(gradients: list[Tensor]) -> None:
        """Average the gradients of scalars over all ranks, as FSDP does with slices. Collective."""
        flat = torch.stack([gradients[i] for i in scalars])
        world.average(flat)
        flat *= scale[0]
        torch._foreach_copy_([gradients[i] for i in scalars], list(flat))

    sharding = Sharding(
        params=params,
        writes=mesh["replicate"].get_local_rank() == 0,
        complete_gradients=average_scalars if scalars else None,
        sum_slices=sum_slices,
        drop_gathered=partial(drop_gathered, model),
        tables=tables,
    )
    return sharding, to_sum
