"""What the launching process learns of the collectives of fully sharded modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtf.distributed.collectives import waiting_group
from dtf.host.waits import Operation, Use

# new names since torch 2.12 or so; the old ones warn there
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather:
    """FSDP's all-gather of one unit, with an entry; see `torch.distributed.fsdp._fully_shard._fsdp_api.AllGather`."""

    def __init__(self, forward: Operation, backward: Operation) -> None:
        self._forward, self._backward = forward, backward

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._forward if torch._C._current_graph_task_id() == -1 else self._backward:
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter:
    """FSDP's reduce-scatter of one unit's gradients, with an entry."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self._operation:
            return _scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def watch_collectives(model: nn.Module, units: list[list[nn.Module]], group: dist.ProcessGroup) -> None:
    """Make the sharded modules of a model say which collective they enter. `group`: of the ranks that share slices.

    `units`: modules that are gathered together.
    """
    waiting = waiting_group(group, "shards")
    names = {module: name for name, module in model.named_modules()}
    heads: dict[int, tuple[FSDPModule, str]] = {}
    members = {id(module): [names[other] for other in unit] for unit in units for module in unit}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            name = _title(members.get(id(module), []) if names[module] else []) or names[module] or "the whole model"
            heads.setdefault(id(module._get_fsdp_state()), (module, name))
    for unit in units:
        for module in unit:
            module.register_forward_pre_hook(Use(names[module], _advice(names[module])), prepend=True)
    forward = [Operation(f"the all-gather of {name} in the forward pass", waiting) for _, name in heads.values()]
    for (head, name), ahead in reversed([*zip(heads.values(), forward, strict=True)]):
        back = Operation(f"the all-gather of {name} in the backward pass", waiting)
        head.set_custom_all_gather(_Gather(ahead, back))  # type: ignore[arg-type]
        reduce = Operation(f"the reduce-scatter of the gradients of {name}", waiting)
        head.set_custom_reduce_scatter(_Scatter(reduce))  # type: ignore[arg-type]


def _title(names: list[str]) -> str:
    """The modules of a unit in few words."""
    return " and ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"


def _advice(name: str) -> str:
    return (
        f"The rows of rank {{rank}} do not use {name}, or not as often as those of others. With strategy=fsdp every "
        "rank has to use every module in each micro-batch, in the same order. Let it see all rows and mask what it "
        "returns, or use strategy=ddp"
    )
