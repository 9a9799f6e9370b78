"""Divides the modules of a model that a layout names among the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtf.api.layout import Split, SplitBy, Splits
from dtf.core.errors import LayoutError
from dtf.model.seeded_calls import HEADS
from dtf.model.seeded_dropout import DROPOUTS
from dtf.strategies.pass_probes import has_hook_on_sums
from dtf.strategies.tensor_parallel.attention import attention_kind, leave_fast_paths
from dtf.strategies.tensor_parallel.layers import CONVOLUTIONS, NORMS, Divided, Grouped, kind_of, outputs
from dtf.strategies.tensor_parallel.slices import heads_here, ranges
from dtf.strategies.tensor_parallel.transformers_models import adjust


def divide(model: nn.Module, splits: Splits, mesh: DeviceMesh) -> None:
    """Divide the named modules of a model, which may be on meta, over a mesh of one axis, in place; see `layout.Split`.
    Not collective.

    ConfigError for a module that cannot be divided so, and for slices that would be empty or cut a group of channels.
    """
    _Division(model, splits, mesh).run()
    leave_fast_paths(model)


def largest_shares(model: nn.Module, splits: Splits, ranks: int) -> tuple[tuple[str, float], ...]:
    """Of each divided module, its name and the share of its parameters that the rank with most of them has, about."""
    found = []
    for name, split in splits.items() if ranks > 1 else ():
        by = split if isinstance(split, SplitBy) else SplitBy(split)
        heads = (
            by.groups or by.heads or (cast(int, model.get_submodule(name).num_heads) if by.split is Split.heads else 0)
        )
        if by.split is not Split.whole:
            found.append((name, math.ceil(heads / ranks) / heads if heads else 1 / ranks))
    return tuple(found)


class _Division:
    """One division of a model."""

    def __init__(self, model: nn.Module, splits: Splits, mesh: DeviceMesh) -> None:
        self._modules, self._mesh = dict(model.named_modules()), mesh
        self._splits = {name: split if isinstance(split, SplitBy) else SplitBy(split) for name, split in splits.items()}
        self._made: dict[int, Any] = {}  # see `Divided.cut`
        # of the activations between a column and its row: all channels, those of this rank, their axis
        self._width, self._here, self._axis = 0, (0, 0), -1

    def run(self) -> None:
        """Divide all of them, in order."""
        for name, by in self._splits.items():
            module = self._modules[name]
            if by.split is Split.local and isinstance(module, DROPOUTS):
                self._cut_mask(name, module, by)
                continue
            self._refuse_watched(name, module)
            if by.split is Split.heads:
                self._divide_attention(name, module)
                continue
            self._become(name, module, by, kind_of(name, module, by))
            if by.heads and by.split is Split.column:  # what makes the weights of attention has these layers
                around, heads = self._modules[name.rpartition(".")[0]], heads_here(name, by, self._mesh)
                if HEADS not in around.__dict__:
                    around.__dict__[HEADS] = heads
                    adjust(around, heads)

    def _become(self, name: str, module: nn.Module, by: SplitBy, kind: type[Divided]) -> Divided:
        """Change a module's class and cut its tensors."""
        width = 0
        if by.split in (Split.column, Split.row_scatter):
            width = by.parts[0] if by.parts else outputs(module)
        module.__class__ = type(f"Divided{type(module).__name__}", (kind, type(module)), {})
        divided = cast(Divided, module)
        divided.__dict__ |= {
            "_mesh": self._mesh,
            "_name": name,
            "_group": self._mesh.get_group(),
            "_by": by,
            "_axis": 1 if isinstance(module, (*CONVOLUTIONS, *NORMS)) else -1,
        }
        divided.cut(name, self._made)
        if kind is Grouped:  # it may change the number of channels
            width = outputs(module)
        if width:
            part = SplitBy(heads=by.heads, groups=by.groups)
            (self._here,) = ranges(name, part, width, self._mesh)
            self._width, self._axis = width, divided._axis
        return divided

    def _divide_attention(self, name: str, module: nn.Module) -> None:
        kind, inside = attention_kind(name, module)
        for child, by in inside.items():
            place, part = f"{name}.{child}", module.get_submodule(child)
            self._become(place, part, by, kind_of(place, part, by))
        by = SplitBy(Split.heads, cast(int, module.num_heads))
        module.__dict__[HEADS] = heads_here(name, by, self._mesh)
        self._become(name, module, by, kind)
        self._width = 0

    def _cut_mask(self, name: str, module: nn.Module, by: SplitBy) -> None:
        """Let a dropout take this rank's part of the mask of all channels, or heads."""
        if by.heads:
            module.__dict__["_slice"] = (1, *heads_here(name, by, self._mesh))
            return
        if not self._width:
            raise LayoutError(f"the recipe's layout splits {name} as local, but no column layer comes before it")
        module.__dict__["_slice"] = (self._axis, self._width, *self._here)

    def _refuse_watched(self, name: str, module: nn.Module) -> None:
        """Raise LayoutError for parameters with hooks, or that modules have which are not divided."""
        hooked = [key for key, p in module.named_parameters() if p._backward_hooks or has_hook_on_sums(p)]
        if hooked:
            raise LayoutError(
                f"the recipe's layout splits {name}, and {name}.{hooked[0]} has a hook of register_hook, which would "
                "see a slice of its gradient; leave it out of the splits"
            )
        inside, parameters = set(module.modules()), {id(parameter) for parameter in module.parameters()}
        for other, tied in self._modules.items():
            own: Mapping[str, Tensor | None] = tied._parameters
            if tied not in inside and other not in self._splits and parameters & {id(p) for p in own.values()}:
                raise LayoutError(
                    f"the recipe's layout splits {name}, whose parameters {other} has too; leave both out of the "
                    "splits, or split both alike"
                )
