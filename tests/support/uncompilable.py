"""The toy with two blocks that torch.compile cannot make one piece of, or not for long.

A plugin: `plugins=[tests.support.uncompilable]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "uncompilable")
class Uncompilable(Toy):
    way: str = option(default="", doc="what its blocks do")

    def build_model(self) -> nn.Module:
        import random

        import numpy as np
        import torch
        from torch import nn

        way = self.way

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.passes = nn.Linear(16, 16), 0
                self.scale: Any
                self.register_buffer("scale", torch.zeros(()))

            def work(self, x: torch.Tensor) -> torch.Tensor:
                return torch.tanh(self.layer(x))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if way == "reads" and x.sum().item() > 1e9:
                    return x
                if way == "reads in evaluation" and not self.training and x.sum().item() > 1e9:
                    return x
                if way == "counts":
                    self.passes += 1
                y = self.work(x)
                if way == "counts" and self.passes > 1000:
                    return y
                if way == "scales by a buffer" and self.training:  # torch computes the cosine again, after the next sum
                    self.scale += 1
                    y = y * torch.cos(self.scale)
                if way == "raises" and torch.compiler.is_compiling():
                    y = y.index_select(0, torch.full((1,), 99))
                if way == "differs in evaluation" and not self.training and torch.compiler.is_compiling():
                    return y * 2
                if way == "draws from Python" and self.training:
                    y = y * random.uniform(0.5, 1.5)
                return y * float(np.random.rand()) if way == "draws from numpy" else y

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Block(), Block()])
                self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.stem(x)
                by = {"passes by": 2, "passes one by": 1}.get(way, 0)
                for i, block in enumerate(self.blocks):
                    x = block.work(x) if i < by else block(x)  # type: ignore[operator]
                return self.head(x)

        return Net()

    def layout(self, model: nn.Module) -> Layout:
        return Layout()
