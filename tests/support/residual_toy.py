"""The toy with two residual blocks, which have what computing again may get wrong.

A plugin: `plugins=[tests.support.residual_toy]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout, Split
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "residual")
class Residual(Toy):
    """Batch statistics, masks of a module and, if `functional`, of a function."""

    functional: bool = option(default=False, doc="drop activations by a function too")

    in_place: bool = option(default=False, doc="write to the inputs of the model")

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        functional = self.functional

        class Block(nn.Module):
            def __init__(self, dropout: float) -> None:
                super().__init__()
                self.rise, self.norm, self.relu = (
                    nn.Linear(16, 32, bias=False),
                    nn.BatchNorm1d(32),
                    nn.ReLU(inplace=True),
                )
                self.drop, self.fall, self.last = nn.Dropout(dropout), nn.Linear(32, 16), nn.LayerNorm(16)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if not torch.compiler.is_compiling():
                    assert self.training or not torch.is_grad_enabled(), "a pass of training, in evaluation"
                y = self.drop(self.relu(self.norm(self.rise(x))))
                if functional:
                    y = nn.functional.dropout(y, 0.2, self.training)
                return torch.relu_(x + self.last(self.fall(y)))

        class Centre(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.sub_(0.25).mul_(2)

        parts = {
            **({"centre": Centre()} if self.in_place else {}),
            "stem": nn.Linear(8, 16, bias=False),
            "norm": nn.BatchNorm1d(16),
            "first": Block(self.dropout),
            "second": Block(self.dropout),
            "head": nn.Linear(16, 4),
        }
        model = nn.Sequential()
        for name, part in parts.items():
            model.add_module(name, part)
        return model

    def layout(self, model: nn.Module) -> Layout:
        inner = {"rise": Split.column, "norm": Split.local, "drop": Split.local, "fall": Split.row}
        splits = {f"{block}.{name}": split for block in ("first", "second") for name, split in inner.items()}
        first = ("centre",) * self.in_place
        return Layout(((*first, "stem", "norm"), ("first",), ("second",), ("head",)), {**splits, "head": Split.classes})
