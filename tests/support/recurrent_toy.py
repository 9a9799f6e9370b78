"""The toy with a recurrent layer that moves its weights, as those of torch do on CUDA.

A plugin: `plugins=[tests.support.recurrent_toy]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout
from dtf.api.registry import register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "recurrent")
class Recurrent(Toy):
    """Rows of 8 numbers as sequences of 4 steps."""

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        class Layer(nn.GRU):
            def flatten_parameters(self) -> None:
                """As torch's: cuDNN wants all weights in one piece of memory."""
                for weight in self._flat_weights:
                    weight.data = weight.data.clone()  # type: ignore[union-attr]

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.head = Layer(2, 8, batch_first=True), nn.Linear(8, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.layer(x.unflatten(1, (4, 2)))[0].mean(1))

        return Model()

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("layer",), ("head",)))
