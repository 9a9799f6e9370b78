"""Messages of tensors that keep their strides. Kernels are chosen by strides, and results may differ in the last
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def axes(tensor: Tensor) -> list[int]:
    """The axes from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))


def dense(tensor: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """The tensor itself if it has no gaps in memory and its axes lie in this `order` (default: any), else a copy for
    which that is true.
    """
    order_in_memory = axes(tensor) if order is None else [*order]
    view = tensor.permute(order_in_memory)
    return (
        tensor
        if view.is_contiguous()
        else empty(
            tensor.shape, order_in_memory if order is not None else [*range(tensor.dim())], tensor.dtype, tensor.device
        ).copy_(tensor)
    )


def message(tensor: Tensor) -> Tensor:
    """The same memory as one contiguous tensor. For a tensor without gaps."""
    return tensor.permute(axes(tensor))


def empty(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for a tensor of this shape whose axes are in this order."""
    back = [list(order).index(axis) for axis in range(len(order))]
    return torch.empty([shape[axis] for axis in order], dtype=dtype, device=device).permute(back)
