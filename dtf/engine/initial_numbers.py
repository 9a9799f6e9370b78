"""Whether all ranks start from the same numbers. Where constructors drew differently, rank 0's numbers are sent."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.core.text import count_text
from dtf.distributed.world import World


def agree_on_start(world: World, model: nn.Module, say: Callable[[str], None], holds: bool = True) -> None:
    """Give all ranks rank 0's parameters and buffers where those of any rank differ, and say so. Collective.

    Processors and numbers of threads may draw differently, and a constructor may draw from what no seed reaches.
    `holds`: whether this rank has numbers of its own. ConfigError where models differ in names or shapes.
    """
    if world.size == 1:
        return
    tensors = _tensors(model)
    digests = world.gather({name: _digest(tensor) for name, tensor in tensors.items()} if holds else None)
    unequal, other_model = list[str](), ""
    if digests is not None:
        first, *others = digests
        for rank, other in enumerate(others, 1):
            if other is None:
                continue
            named = _other_model(first, other)
            if named:
                other_model = f"rank {rank} builds another model than rank 0: they differ in {named}"
                break
            unequal += [name for name in first if other[name] != first[name] and name not in unequal]
    unequal, other_model = world.broadcast([unequal, other_model])
    if other_model:
        raise ConfigError(f"{other_model}; build_model() must make the same modules on all ranks")
    if unequal:
        for name in unequal:
            world.send_from_first(tensors[name].data if holds else torch.empty_like(tensors[name]).contiguous())
        say(
            f"ranks drew different initial numbers for {count_text(len(unequal), 'tensor')}, {unequal[0]} first; all "
            "start from rank 0's. The seed does not reach what build_model() draws from, or their machines differ"
        )


def _other_model(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first tensor that only one of two models has, or that has another shape or format; empty if none."""
    if list(other) != list(first):
        return next(iter(other.keys() ^ first.keys()), next(iter(first)))
    forms = {name: (first[name].rpartition(" ")[0], other[name].rpartition(" ")[0]) for name in first}
    return next((f"{name}, {b} and not {a}" for name, (a, b) in forms.items() if a != b), "")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _digest(tensor: Tensor) -> str:
    """Of shape, format and bytes."""
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data if tensor.numel() else b""
    return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data):08x}"
