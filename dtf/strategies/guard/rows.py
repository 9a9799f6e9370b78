"""The rows of one micro-batch on all replicas, in memory that lies as it does where they come from.

On a CPU, kernels may round otherwise for rows that begin at another place within a cache line.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.core import nest
from dtf.core.types import Batch
from dtf.distributed.batch_broadcast import BatchBroadcast

_LINE = 64
"""Bytes of a cache line, at whose begin torch's own memory lies."""


class RowsToAll:
    """Gives the rows that one rank of a group has to all of them. `inputs`: see BatchBroadcast."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, inputs: bool = True) -> None:
        self._group, self._broadcast = group, BatchBroadcast(group, device, inputs)

    def __call__(self, rows: Batch | None, source: int) -> Batch:
        """A copy of the rows of the rank `source` of the group. `rows`: None on the others. Collective."""
        batch = self._broadcast(rows, source)
        places = torch.tensor([_place(tensor) for tensor in _tensors(batch if rows is None else rows)])
        dist.broadcast(places, group=self._group, group_src=source)
        return placed(batch, places.tolist())


def copy_in_place(rows: Batch) -> Batch:
    """A copy of the rows in memory that lies alike."""
    return placed(rows, [_place(tensor) for tensor in _tensors(rows)])


def placed(batch: Batch, places: list[int]) -> Batch:
    """A copy of a batch whose tensors begin so many bytes after a cache line."""
    moved = [_copy(tensor, place) for tensor, place in zip(_tensors(batch), places, strict=True)]
    inputs, targets = nest.rebuild((batch.inputs, batch.targets), moved)
    return Batch(inputs, targets, moved[-1], batch.ids.copy())


def _tensors(batch: Batch) -> list[Tensor]:
    return [*nest.leaves(batch.inputs), *nest.leaves(batch.targets), batch.weight]


def _place(tensor: Tensor) -> int:
    place = 0 if tensor.is_meta or not tensor.numel() else tensor.data_ptr() % _LINE
    return 0 if place % tensor.element_size() else place


def _copy(tensor: Tensor, place: int) -> Tensor:
    if tensor.is_meta or not place:
        return tensor.clone()
    before = place // tensor.element_size()
    memory = torch.empty(before + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    dense = tensor.clone()  # without gaps
    return memory.as_strided(dense.shape, dense.stride(), before).copy_(dense)
