"""Models that strategies get wrong easily: ties, frozen parts, parameters on containers, a train() of its own, formats
of its own. A plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout, Split
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn

ALL = (("a",), ("b",), ("c",), ("d",))
CUTS = {"tied": (("a",), ("b", "c"), ("d",))}
TENSOR = {
    "prelu": {"b": Split.column, "c": Split.row},
    "penalised": {"b": Split.column, "c": Split.row},
    "undropped": {"b": Split.column, "c": Split.row},
    "rowless": {"b": Split.column},
    "counting": {"b": Split.column, "c": Split.row},
    "tied": {"b": Split.column, "c": Split.row},
    "frozen": {"b": Split.column, "c": Split.row, "d": Split.classes},
}


@register("recipe", "odd")
class Odd(Toy):
    kind: str = option(default="tied", doc="which oddity")

    def build_model(self) -> nn.Module:
        from tests.support.corner_case_models import build

        return build(self.kind)

    def layout(self, model: nn.Module) -> Layout:
        blocks = () if self.kind == "unknown" else CUTS.get(self.kind, ALL)
        return Layout(blocks, TENSOR.get(self.kind, {}))
