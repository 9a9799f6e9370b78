"""A model whose author clips the gradient of a parameter. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.registry import register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "clipping")
class Clipping(Toy):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.get_parameter("0.weight").register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        return model
