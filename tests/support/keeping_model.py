"""A recipe whose model keeps something from pass to pass, in ways of which no checkpoint tells. A plugin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.layout import Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy


class Keeping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.passes, self.seen = kind, 0, 0.0
        if kind in ("tensor", "looked_at"):
            self.kept = torch.zeros(8)
        elif kind in ("buffer", "saved"):
            self.register_buffer("kept", torch.zeros(8), persistent=kind == "saved")

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.kind == "none" or not self.training:
            return x
        if self.kind == "extra":
            self.seen += 0.1
            return x + self.seen
        if self.kind == "late" and "kept" not in self._buffers:
            self.register_buffer("kept", torch.zeros(8))
        self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0).to(self.kept)
        return x if self.kind == "looked_at" else x + self.kept

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


@register("recipe", "keeping")
class KeepingRecipe(Toy):
    kind: str = option(default="none", doc="what the model keeps")

    def build_model(self) -> nn.Module:
        return nn.Sequential(Keeping(self.kind), super().build_model())

    def layout(self, model: nn.Module) -> Layout:
        return Layout()
