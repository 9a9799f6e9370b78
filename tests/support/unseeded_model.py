"""A model whose constructor draws from what no seed reaches, and keeps it in a plain attribute. A recipe that makes its
model once. A plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout
from dtf.api.registry import register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import Tensor, nn


@register("recipe", "unseeded")
class Unseeded(Toy):
    def build_model(self) -> nn.Module:
        import numpy as np
        from torch import nn

        class Shuffled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.order = np.random.default_rng().permutation(8)
                self.layer = nn.Linear(8, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x[:, self.order])

        return Shuffled()

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("layer",),))


@register("recipe", "kept")
class Kept(Toy):
    def build_model(self) -> nn.Module:
        if not hasattr(self, "net"):
            self.net = super().build_model()
        return self.net
