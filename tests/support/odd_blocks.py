"""The toy with two blocks that compute the same when they are compiled, and look as if they did not.

A plugin: `plugins=[tests.support.odd_blocks]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import BufferUpdate, Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "odd_blocks")
class OddBlocks(Toy):
    way: str = option(default="", doc="what its blocks do")

    def build_model(self) -> nn.Module:
        import random

        import torch
        from torch import nn

        way = self.way

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
                self.passes: Any
                self.register_buffer("passes", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> Any:
                y = torch.tanh(self.layer(x))
                if way == "ignored output":
                    return y, self.other(x)
                if way == "ignored penalty":
                    return y, self.other.weight.square().sum()
                y = torch.relu(self.other(y))
                if self.training and "counts" in way:
                    self.passes += 1
                    y = y + torch.cos(self.passes)
                return y, None

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Block(), Block()])
                self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.stem(x)
                for block in self.blocks:
                    if way == "leaves out by Python" and self.training and random.random() < 0.5:
                        continue
                    x, _ = block(x)
                return self.head(x)

        return Net()

    def layout(self, model: nn.Module) -> Layout:
        return Layout(buffers={"blocks.*.passes": BufferUpdate.mean} if self.way == "counts by a rule" else {})
