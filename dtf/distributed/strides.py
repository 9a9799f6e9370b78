"""Tensors as messages that arrive with the strides they left with: kernels choose by strides, and the last bits with
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def axes(tensor: Tensor) -> list[int]:
    """The axes from the one with the widest stride to the one with the smallest."""
    return sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))


def dense(tensor: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """The tensor itself if it has no gaps in memory, and its axes there are in this `order` (default: any); else a copy
    of which that is true.
    """
    own = axes(tensor) if order is None else [*order]
    view = tensor.permute(own)
    return (
        tensor
        if view.is_contiguous()
        else empty(
            tensor.shape, own if order is not None else [*range(tensor.dim())], tensor.dtype, tensor.device
        ).copy_(tensor)
    )


def message(tensor: Tensor) -> Tensor:
    """The same memory as one contiguous tensor; for a tensor without gaps."""
    return tensor.permute(axes(tensor))


def empty(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for a tensor of this shape whose axes are in this order."""
    back = [list(order).index(axis) for axis in range(len(order))]
    return torch.empty([shape[axis] for axis in order], dtype=dtype, device=device).permute(back)
