"""Which server holds which slices of a model's parameters, and how slices lie in memory and in messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtf.api.optimizer import Optimizer
from dtf.api.precision import Precision
from dtf.core.errors import ConfigError
from dtf.distributed.sharding import bounds
from dtf.model.init import formats
from dtf.pserver.placement import place_slices

ALIGNED = 64
"""Each block begins at a multiple of so many bytes: any dtype fits, and no two blocks share a cache line."""


class Block(NamedTuple):
    """A slice of a parameter: rows [first, last) of its first axis; a scalar parameter is one block."""

    name: str  # of the parameter
    first: int
    last: int
    shape: tuple[int, ...]  # of the block
    whole: tuple[int, ...]  # of the parameter
    dtype: torch.dtype  # in which it computes
    kept: torch.dtype  # in which it is kept
    at: int  # byte where it begins in its server's memory

    @property
    def offset(self) -> tuple[int, ...]:
        return (self.first, *(0 for _ in self.whole[1:])) if self.whole else ()

    def of(self, tensor: Tensor) -> Tensor:
        """The view of this block in a tensor of the whole parameter."""
        return tensor[self.first : self.last] if self.whole else tensor


class Layout(NamedTuple):
    """The blocks of one server and the bytes they take, first those that learn, then the others."""

    learning: tuple[Block, ...]
    bytes: int
    frozen: tuple[Block, ...]
    frozen_bytes: int


def lay_out(
    model: nn.Module, precision: Precision, servers: int, sliced: bool, least: int, placement: str
) -> list[Layout]:
    """Distribute the parameters of `model`, on meta or not, over servers; a layout for each server.

    `sliced`: cut them into as many slices as there are servers, of at least `least` elements; False where the optimizer
    looks at whole tensors. `placement`: name of the
    rule that assigns slices to servers.
    """
    pairs, parameters = formats(model, precision), dict(model.named_parameters())
    ends = {
        name: _cuts(parameter, servers, least) if sliced else [(0, _rows(parameter))]
        for name, parameter in parameters.items()
    }
    sizes = {
        name: [parameters[name].numel() // _rows(parameters[name]) * (last - first) for first, last in cuts]
        for name, cuts in ends.items()
    }
    owners = place_slices(placement, sizes, servers)
    for name, slices in sizes.items():
        servers_of = list(owners.get(name, []))
        if (
            len(servers_of) != len(slices)
            or len(set(servers_of)) != len(servers_of)
            or not set(servers_of) <= set(range(servers))
        ):
            raise ConfigError(
                f"strategy.placement={placement} puts {len(slices)} slices of {name} on servers {servers_of}; name for "
                f"each one of 0 to {servers - 1}, none twice"
            )
    return [_layout(server, parameters, pairs, ends, owners) for server in range(servers)]


def _layout(
    server: int,
    parameters: Mapping[str, nn.Parameter],
    pairs: Mapping[str, tuple[torch.dtype, torch.dtype]],
    ends: Mapping[str, list[tuple[int, int]]],
    owners: Mapping[str, list[int]],
) -> Layout:
    blocks: dict[bool, list[Block]] = {True: [], False: []}
    filled = {True: 0, False: 0}
    for name, parameter in parameters.items():
        if server not in owners[name]:
            continue
        first, last = ends[name][list(owners[name]).index(server)]
        kept, dtype = pairs.get(name, (parameter.dtype, parameter.dtype))
        shape, learns = (last - first, *parameter.shape[1:]) if parameter.dim() else (), parameter.requires_grad
        blocks[learns].append(Block(name, first, last, shape, tuple(parameter.shape), dtype, kept, filled[learns]))
        filled[learns] += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    return Layout(tuple(blocks[True]), filled[True], tuple(blocks[False]), filled[False])


def _rows(parameter: nn.Parameter) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def _cuts(parameter: nn.Parameter, servers: int, least: int) -> list[tuple[int, int]]:
    """First and last + 1 row of each slice."""
    rows = _rows(parameter)
    count = max(1, min(servers, parameter.numel() // least, rows))
    cuts = [bounds(rows, count, number) for number in range(count)]
    return [(first, last) for first, last in cuts if first < last]


def wire_layout(layout: Layout, wire: torch.dtype | None) -> Layout:
    """The layout of learning blocks in messages: those of fp32 in the dtype `wire`, if any."""
    if wire is None:
        return layout
    blocks, at = [], 0
    for block in layout.learning:
        blocks.append(block._replace(dtype=wire if block.dtype is torch.float32 else block.dtype, at=at))
        at += -(-math.prod(block.shape) * blocks[-1].dtype.itemsize // ALIGNED) * ALIGNED
    return layout._replace(learning=tuple(blocks), bytes=at)


class Field(NamedTuple):
    """A learning block's master numbers, or one tensor of its optimizer state."""

    block: Block
    key: str  # of the state; empty for the block itself
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int


def state_fields(layout: Layout, optimizer: Optimizer) -> tuple[tuple[Field, ...], int]:
    """The learning blocks of a server with their optimizer state, and the bytes of all in one piece of memory."""
    result, at = [], 0
    for block in layout.learning:
        kept = torch.empty(block.shape, dtype=block.kept, device="meta")
        for key, tensor in {"": kept, **optimizer.init(kept)}.items():
            result.append(Field(block, key, tuple(tensor.shape), tensor.dtype, at))
            at += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
    return tuple(result), at


def views(memory: Tensor, blocks: Sequence[Block | Field]) -> list[Tensor]:
    """Views of the blocks in the memory (bytes,) uint8 of their server."""
    return [
        memory[block.at : block.at + math.prod(block.shape) * block.dtype.itemsize].view(block.dtype).view(block.shape)
        for block in blocks
    ]


def balance(layouts: Sequence[Layout]) -> str:
    """For the start-up table: what each server holds of the model."""
    texts = [
        f"{number}: {len(layout.learning) + len(layout.frozen)} blocks, "
        f"{(layout.bytes + layout.frozen_bytes) / 2**20:.1f} MiB"
        for number, layout in enumerate(layouts)
    ]
    return "; ".join(texts)
