"""What a rank of a device mesh has of the parameters, and what it exchanges around an update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtf.distributed.collectives import waiting_group
from dtf.distributed.device_mesh import COPIES, ROWS, ParallelDims
from dtf.distributed.grad_allreduce import GradientSum
from dtf.host.waits import Operation
from dtf.optim.sharding import ParamShard, Sharding
from dtf.sparse.sharded_tables import ShardedTables


def drop_gathered(modules: Iterable[nn.Module]) -> None:
    """Drop the whole parameters that are gathered at the moment, or on their way: a pass that left a module out, or
    used another one first, has not taken what was gathered ahead for it.
    """
    for module in modules:
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


def sum_gradients(models: Iterable[nn.Module]) -> None:
    """From now on sum gradients over the ranks that divide them, which would be averaged."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)


def mesh_sharding(
    models: Sequence[nn.Module],
    params: Mapping[str, ParamShard],
    dims: ParallelDims,
    tables: ShardedTables | None,
    partial_names: Collection[str] = (),
) -> Sharding:
    """The Sharding of what this rank has: `models`, the whole one or stages of it, whose parameters are `params`.
    Gradients are summed over the ranks that compute other rows or positions. `partial_names`: of those that ranks which
    divide layers compute from some positions each.
    """
    sharded = dims.sizes.shard > 1
    return Sharding(
        params=params,
        writes=dims.place["replicate"] == dims.place["context"] == 0,
        complete_gradients=_completion(params, dims, partial_names),
        sum_slices=_slice_total(dims) if dims.slices is not None else None,
        drop_gathered=partial(drop_gathered, [m for model in models for m in model.modules()]) if sharded else None,
        tables=tables,
    )


def _slice_total(dims: ParallelDims) -> Callable[[Tensor], Tensor]:
    assert dims.slices is not None
    adding = Operation("the sum of gradient norms", waiting_group(dims.slices, "slices"))

    def total(sums: Tensor) -> Tensor:
        with adding:
            return dims.total_of_slices(sums)

    return total


def _completion(
    params: Mapping[str, ParamShard], dims: ParallelDims, partial_names: Collection[str]
) -> Callable[[list[Tensor]], None] | None:
    """What sums gradients over the ranks that computed other rows or positions, where the backward pass has not."""
    trained = [(name, shard) for name, shard in params.items() if shard.parameter.requires_grad]
    everything = range(len(trained))
    whole = [i for i, (_, p) in enumerate(trained) if not p.parameter.numel() or not p.shape]
    steps: list[tuple[Sequence[int], GradientSum]] = []

    def add(indices: Sequence[int], *axes: str) -> None:
        group = dims.group(*axes) if indices else None
        if group is not None:
            steps.append((indices, GradientSum(group)))
            dims.summed.append((axes, [trained[i][1].local for i in indices]))

    if dims.sizes.shard > 1:  # the wrapper has summed what it divides
        add(whole, *ROWS)
        add(everything, "context")
    else:
        add(everything, *COPIES)
    add([i for i, (name, _) in enumerate(trained) if name in partial_names], "tensor")

    def complete(gradients: list[Tensor]) -> None:
        for indices, total in steps:
            total([gradients[i] for i in indices])

    return complete if steps else None
