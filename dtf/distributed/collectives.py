"""Collectives inside a model's forward pass, with their counterparts in the backward pass. Where ranks compute alike,
gradients are alike.

Each is collective over the group in forward, in backward, or in both. Per rank, ring algorithms send 2 (n - 1) / n of a
tensor for an all-reduce and (n - 1) / n for a reduce-scatter or an all-gather. Source: Shoeybi et al. 2019, section 3
(arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.distributed.sharding import bounds
from dtf.host.waits import Group, Operation, group_of, operation

# they return what they compute, which step.remat=selective can keep; those of torch.distributed write into a tensor
_ops = torch.ops._c10d_functional

PARTIAL: ContextVar[bool] = ContextVar("partial", default=False)
"""Whether the result that is computed now is only the input of a collective. Keeping the collective's result then makes
keeping this one unnecessary.
"""

UNNAMED = "a part of the loss"
"""What a collective outside a module is called."""


class _Fan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.name = group, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _summed(gradient, ctx.group, f"the all-reduce of {ctx.name} in the backward pass"), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:  # type: ignore[override]
        return _summed(x, group, f"the all-reduce of {name} in the forward pass")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient, None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: dist.ProcessGroup, name: str) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.group, ctx.name, ctx.width = axis, group, name, x.shape[axis]
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        first, last = bounds(ctx.width, size, rank)
        front = _padded(x.movedim(axis, 0), size)
        with _entering(f"the reduce-scatter of {name} in the forward pass", group):
            part = _ops.wait_tensor(_ops.reduce_scatter_tensor(front, "sum", size, group.group_name))
        return part[: last - first].movedim(0, axis).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        size = dist.get_world_size(ctx.group)
        front = gradient.movedim(ctx.axis, 0)
        chunk = -(-ctx.width // size)
        part = (
            torch.cat([front, front.new_zeros(chunk - front.shape[0], *front.shape[1:])])
            if front.shape[0] < chunk
            else front.contiguous()
        )
        with _entering(f"the all-gather of {ctx.name} in the backward pass", ctx.group):
            whole = _ops.wait_tensor(_ops.all_gather_into_tensor(part, size, ctx.group.group_name))
        return whole[: ctx.width].movedim(0, ctx.axis).contiguous(), None, None, None


@contextmanager
def partial() -> Iterator[None]:
    """A context for what computes a summand of `total` or `scattered_total`."""
    token = PARTIAL.set(True)
    try:
        yield
    finally:
        PARTIAL.reset(token)


def fan(x: Tensor, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """The identity in forward, an all-reduce in backward: `x`, alike on all ranks, is used differently by each.

    `name`: of the module, here and below.
    """
    return _Fan.apply(x, group, name)  # type: ignore[return-value]


def total(x: Tensor, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """An all-reduce in forward, the identity in backward: what follows the sum is computed alike by all ranks."""
    return _Sum.apply(x, group, name)  # type: ignore[return-value]


def scattered_total(x: Tensor, axis: int, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """A reduce-scatter in forward, an all-gather in backward: this rank's slice along `axis` of the sum of `x` over
    ranks. Slices are those of `sharding.bounds`.
    """
    return _SumScatter.apply(x, axis, group, name)  # type: ignore[return-value]


def waiting_group(group: dist.ProcessGroup, name: str) -> Group:
    """A process group as the launching process knows it, called `name` there."""
    return group_of(name, tuple(dist.get_process_group_ranks(group)))


@cache
def _waiting_group(group_name: str) -> Group:
    return waiting_group(dist.distributed_c10d._resolve_process_group(group_name), "modules")  # type: ignore[arg-type]


def _entering(name: str, group: dist.ProcessGroup) -> Operation:
    return operation(name, _waiting_group(group.group_name))


def _summed(x: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    with _entering(name, group):
        return _ops.wait_tensor(_ops.all_reduce(x, "sum", group.group_name))


def _padded(x: Tensor, size: int) -> Tensor:
    """`x` (w, ...) with zero rows behind, so that `size` divides them: slices in a message have one size."""
    missing = -x.shape[0] % size
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()
