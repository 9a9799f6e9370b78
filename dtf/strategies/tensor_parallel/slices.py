"""Which slices ranks get, and what divided modules say of theirs: each is a plain tensor, and a table in its module has
its place in the global one. Works without importing DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dtf.api.layout import SplitBy
from dtf.core.errors import ConfigError, LayoutError
from dtf.core.text import count_text
from dtf.distributed.sharding import Slice, balanced, bounds
from dtf.model.batch_statistics import EMA_SUFFIX

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TABLE = "_slices"
"""The attribute of a divided module: key of a parameter or buffer -> Slice."""

EXCHANGE = "_dtf_exchange"
"""The attribute of a module that exchanges heads and positions with other ranks."""

DEGREE = "strategy.degree, or strategy.tensor of a mesh"
"""The keys that say how many ranks divide a layer, for messages."""


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """Name of each divided parameter and buffer of a model, shared ones under each of their names -> what the tensor is
    of the global one. Empty: nothing is divided.
    """
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        table = module.__dict__.get(TABLE, {})
        # a running average's own average is divided as it is
        averages = {
            f"{key}{EMA_SUFFIX}": part for key, part in table.items() if f"{key}{EMA_SUFFIX}" in module._buffers
        }
        found |= {f"{prefix}.{key}" if prefix else key: part for key, part in {**table, **averages}.items()}
    return found


def is_divided(model: nn.Module) -> bool:
    """Whether modules of it talk to other ranks."""
    return bool(slices_of(model)) or any(EXCHANGE in module.__dict__ for module in model.modules())


def check_enough(name: str, count: int, of: str, size: int) -> None:
    """ConfigError, on all ranks alike, when one of `size` gets none of the `count`."""
    first, last = bounds(count, size, size - 1)
    if first == last:
        raise ConfigError(
            f"{name} has {count} {of}, of which a split over {size} ranks leaves one none; use fewer, see {DEGREE}"
        )


def heads_here(name: str, by: SplitBy, mesh: DeviceMesh) -> tuple[int, int, int]:
    """The number of heads, first and last + 1 of this rank's. ConfigError, on all ranks alike, when one gets none."""
    groups = by.groups or by.heads
    if by.heads % groups:
        raise LayoutError(
            f"the recipe's layout gives {name} {by.heads} heads in {groups} groups, which do not divide them"
        )
    if groups < mesh.size():
        of = count_text(groups, "key-value head" if by.groups else "head")
        raise ConfigError(
            f"{name} has {of}, fewer than the {mesh.size()} ranks that divide them; use at most {groups} "
            f"({DEGREE}), or leave this attention out of the layout's splits"
        )
    first, last = balanced(groups, mesh.size(), mesh.get_local_rank())
    return by.heads, first * (by.heads // groups), last * (by.heads // groups)


def ranges(name: str, by: SplitBy, width: int, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """This rank's [first, last) of the channels of a tensor, for each part. ConfigError where they cannot be cut so."""
    parts = by.parts or (width,)
    if sum(parts) != width:
        raise LayoutError(f"the recipe's layout gives {name} the parts {parts}, and it has {width} channels")
    found, begin = [], 0
    for part in parts:
        if by.heads:
            groups = by.groups or by.heads
            if part % groups:
                raise LayoutError(
                    f"the recipe's layout gives {name} {groups} heads, which do not divide {part} channels"
                )
            _, first, last = heads_here(name, by, mesh)
            first, last = first * part // by.heads, last * part // by.heads
        else:
            first, last = bounds(part, mesh.size(), mesh.get_local_rank())
        found.append((begin + first, begin + last))
        begin += part
    return found
