"""Additive metric state: sums that mean the same however rows were divided among ranks, steps and micro-batches.

No torch when imported: modules of recipes import it at their top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def weighted_sums(weight: Tensor, *values: Tensor) -> Tensor:
    """[sum(weight), sum(weight * value), ...] of values per row, each (B,). Shape (1 + len(values),), float64, so that
    counts are exact. ValueError for values of another shape. Not collective.
    """
    import torch

    for value in values:
        if value.shape != weight.shape:
            raise ValueError(
                f"weighted_sums() got values of shape {tuple(value.shape)} for {len(weight)} rows; give one number for "
                f"each row, ({len(weight)},)"
            )
    return torch.stack([weight, *(weight * value for value in values)]).sum(dim=1, dtype=torch.float64)
