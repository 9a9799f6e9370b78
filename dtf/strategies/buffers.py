"""Buffers of a model on their way to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from dtf.api.task import Source
from dtf.core.types import Box, Shard
from dtf.distributed.sharding import Slice, is_dtensor, local, slice_of
from dtf.model.batch_statistics import EMA_SUFFIX, BatchNormStatistics
from dtf.model.ema import EMA_PREFIX
from dtf.strategies.tensor_parallel.slices import slices_of

SHARE = "share_"
"""Tensors under `share_<index>/` belong to one share of the rows; all others to the run."""


class Part(Protocol):
    """A model or a part of one, with what it averages."""

    model: nn.Module
    statistics: BatchNormStatistics

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that are no part of the run's state."""
        ...


def buffers(part: Part, first: bool = True) -> list[Box]:
    """Boxes of the model's persistent buffers, with running averages and their counters.

    `first`: whether this rank writes the tensors that every rank holds in whole; slices are written by each.
    """
    persistent = part.model.state_dict().keys() - dict(part.model.named_parameters()).keys() - part.scratch
    named = [(name, buffer) for name, buffer in part.model.named_buffers() if name in persistent]
    named += [(name, torch.tensor(steps)) for name, steps in part.statistics.counters().items()]
    divided = slices_of(part.model)
    kept = [(name, buffer) for name, buffer in named if first or name in divided or is_dtensor(buffer)]
    return [box for name, buffer in kept for box in _boxes(stored(name), buffer, buffer, divided.get(name))]


def stored(name: str) -> str:
    """The name of a buffer in a checkpoint."""
    return f"{EMA_PREFIX}{name.removesuffix(EMA_SUFFIX)}" if name.endswith(EMA_SUFFIX) else f"model/{name}"


def own_averages(part: Part, shard: Shard, first: bool = True) -> list[Box]:
    """Boxes of the running averages that this share of the rows has made; `first` as for `buffers`.

    A run that is resumed with as many shares goes on from them, else from their mean.
    """
    if shard.count == 1:  # they are the mean, which `buffers` has
        return []
    whole, divided = dict(part.model.named_buffers()), slices_of(part.model)
    return [
        box
        for name, tensor in part.statistics.stashed().items()
        if first or name in divided or is_dtensor(whole[name])
        for box in _boxes(f"{SHARE}{shard.index}/{name}", tensor, whole[name], divided.get(name))
    ]


@torch.no_grad()
def load_buffers(part: Part, source: Source, shard: Shard) -> None:
    """Inverse of `buffers` and `own_averages`."""
    persistent, whole = set(part.model.state_dict()) - part.scratch, dict(part.model.named_buffers())
    divided = slices_of(part.model)

    def take(place: str, name: str, into: Tensor) -> None:
        shape, pieces = slice_of(whole[name], divided.get(name))
        for piece in pieces:
            source.read_into(place, piece.here(into), piece.offset, shape)

    for name, buffer in whole.items():
        if name in persistent:
            take(stored(name), name, local(buffer))
    for name in part.statistics.counters():
        part.statistics.restore(int(source.read(f"model/{name}", shape=())))
    if len({name.split("/")[0] for name in source.names() if name.startswith(SHARE)}) == shard.count > 1:
        part.statistics.stash()
        for name, held in part.statistics.stashed().items():
            take(f"{SHARE}{shard.index}/{name}", name, held)


def _boxes(name: str, tensor: Tensor, like: Tensor, divided: Slice | None) -> Iterator[Box]:
    """`tensor` as the part of a global tensor that `like`, perhaps a DTensor or `divided`, is."""
    shape, pieces = slice_of(like, divided)
    for piece in pieces:
        yield Box(name, piece.here(local(tensor.detach())), shape, piece.offset)
