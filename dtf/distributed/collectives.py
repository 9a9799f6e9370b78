"""Collectives inside a model's forward pass, with their counterparts in the backward pass. Where ranks compute alike,
gradients are alike.

Each is collective over the group in forward, in backward, or in both. Per rank, ring algorithms send 2 (n - 1) / n of a
tensor for an all-reduce and (n - 1) / n for a reduce-scatter or an all-gather. Source: Shoeybi et al. 2019, section 3
(arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


Axis = tuple[int, Callable[[int, int, int], tuple[int, int]]]
"""An axis, and a function of its width, the number of ranks and a rank, which gives first and last + 1 of its slice."""


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
        return _scattered(x, axis, group, f"the reduce-scatter of {name} in the forward pass")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        what = f"the all-gather of {ctx.name} in the backward pass"
        return _gathered(gradient, ctx.axis, ctx.width, ctx.group, what), None, None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, width: int, group: dist.ProcessGroup, name: str) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.group, ctx.name = axis, group, name
        return _gathered(x, axis, width, group, f"the all-gather of {name} in the forward pass")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        what = f"the reduce-scatter of {ctx.name} in the backward pass"
        return _scattered(gradient, ctx.axis, ctx.group, what), None, None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: dist.ProcessGroup, name: str) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.group, ctx.name, ctx.width = axis, group, name, x.shape[axis]
        return _own(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        what = f"the all-gather of {ctx.name} in the backward pass"
        return _gathered(gradient, ctx.axis, ctx.width, ctx.group, what), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, width: int, group: dist.ProcessGroup, name: str) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.group = axis, group
        return _gathered(x, axis, width, group, f"the all-gather of {name} in the forward pass")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return _own(gradient, ctx.axis, ctx.group), None, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, cut: Axis, join: Axis, width: int, group: dist.ProcessGroup, name: str
    ) -> Tensor:
        ctx.back, ctx.group, ctx.name = (join, cut, x.shape[cut[0]]), group, name
        return _exchanged(x, cut, join, width, group, f"the all-to-all of {name} in the forward pass")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        what = f"the all-to-all of {ctx.name} in the backward pass"
        cut, join, width = ctx.back
        return _exchanged(gradient, cut, join, width, ctx.group, what), None, None, None, None, None


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


def gathered(x: Tensor, axis: int, width: int, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """An all-gather in forward, a reduce-scatter in backward: all `width` elements along `axis`, of which `x` is this
    rank's slice, and which each rank uses differently.
    """
    return _GatherSum.apply(x, axis, width, group, name)  # type: ignore[return-value]


def own_slice(x: Tensor, axis: int, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """This rank's slice of `x`, alike on all ranks, in forward; an all-gather in backward."""
    return _Cut.apply(x, axis, group, name)  # type: ignore[return-value]


def joined(x: Tensor, axis: int, width: int, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """An all-gather in forward, this rank's slice in backward: as `gathered`, where all ranks compute alike with it."""
    return _Join.apply(x, axis, width, group, name)  # type: ignore[return-value]


def exchanged(x: Tensor, cut: Axis, join: Axis, width: int, group: dist.ProcessGroup, name: str = UNNAMED) -> Tensor:
    """An all-to-all in forward and in backward: from this rank's slice of `width` elements along `join`, with all along
    `cut`, to all along `join`, with this rank's slice along `cut`. Each is an axis and how it is cut, such as
    `sharding.bounds`.
    """
    return _Exchange.apply(x, cut, join, width, group, name)  # type: ignore[return-value]


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


def _own(x: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    first, last = bounds(x.shape[axis], dist.get_world_size(group), dist.get_rank(group))
    # a view of an input is refused where the next module changes it in place
    return x.narrow(axis, first, last - first).clone(memory_format=torch.contiguous_format)


def _scattered(x: Tensor, axis: int, group: dist.ProcessGroup, what: str) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    first, last = bounds(x.shape[axis], size, rank)
    front = _padded(x.movedim(axis, 0), size)
    with _entering(what, group):
        part = _ops.wait_tensor(_ops.reduce_scatter_tensor(front, "sum", size, group.group_name))
    return part[: last - first].movedim(0, axis).contiguous()


def _gathered(x: Tensor, axis: int, width: int, group: dist.ProcessGroup, what: str) -> Tensor:
    size, front = dist.get_world_size(group), x.movedim(axis, 0)
    missing = -(-width // size) - front.shape[0]
    part = torch.cat([front, front.new_zeros(missing, *front.shape[1:])]) if missing else front.contiguous()
    with _entering(what, group):
        whole = _ops.wait_tensor(_ops.all_gather_into_tensor(part, size, group.group_name))
    return whole[:width].movedim(0, axis).contiguous()


def _exchanged(x: Tensor, cut: Axis, join: Axis, width: int, group: dist.ProcessGroup, what: str) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ranges = [cut[1](x.shape[cut[0]], size, other) for other in range(size)]
    given = [x.narrow(cut[0], first, last - first).reshape(-1) for first, last in ranges]
    shapes = []
    for other in range(size):
        shape, (first, last) = [*x.shape], join[1](width, size, other)
        shape[cut[0]], shape[join[0]] = ranges[rank][1] - ranges[rank][0], last - first
        shapes.append(torch.Size(shape))
    counts = [shape.numel() for shape in shapes]
    with _entering(what, group):
        flat = _ops.all_to_all_single(torch.cat(given), counts, [part.numel() for part in given], group.group_name)
        flat = _ops.wait_tensor(flat)
    parts = [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
    return torch.cat(parts, join[0])


def _padded(x: Tensor, size: int) -> Tensor:
    """`x` (w, ...) with zero rows behind, so that `size` divides them: slices in a message have one size."""
    missing = -x.shape[0] % size
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()
