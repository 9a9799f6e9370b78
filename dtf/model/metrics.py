"""Additive metric state: sums that mean the same however rows were divided among ranks, steps and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def weighted_sums(weight: Tensor, *values: Tensor) -> Tensor:
    """[sum(weight), sum(weight * value), ...] of per-row values, each (B,): shape (1 + len(values),), float64 for an
    exact count.
    """
    import torch

    rows = torch.stack([torch.ones_like(weight), *(value.to(weight.dtype) for value in values)])
    return (rows * weight).sum(dim=1, dtype=torch.float64)
