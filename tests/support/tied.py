"""Causal Transformers whose embedding is their output layer too, and a model that calls a layer twice. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "tied")
class Tied(Toy):
    kind: str = option(default="function", doc="how the weight is shared")

    def build_model(self) -> nn.Module:
        from tests.support.tied_models import build

        return build(self.kind)

    def layout(self, model: nn.Module) -> Layout:
        last = ("norm", "head") if self.kind == "modules" else ("norm",)
        return Layout((("embed",), ("first",), ("second",), ("third",), last))


@register("recipe", "tied_by_name")
class TiedByName(Tied):
    """The same, drawn by name."""

    def initialise(self, name: str, module: nn.Module) -> None:
        import torch

        if name.endswith("embed"):
            torch.nn.init.normal_(module.weight, std=0.3)  # type: ignore[arg-type]
        elif name != "head":
            super().initialise(name, module)
        if hasattr(module, "table"):
            module.table.fill_(0.25)  # type: ignore[operator,union-attr]


@register("recipe", "remembering")
class Remembering(Toy):
    """A block that keeps a tensor in a plain attribute from pass to pass, or draws from Python's generator."""

    python_random: bool = option(default=False, doc="draw instead")

    def build_model(self) -> nn.Module:
        from tests.support.tied_models import Remembers

        return Remembers(self.python_random)

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("first",), ("memory",), ("last",)))
