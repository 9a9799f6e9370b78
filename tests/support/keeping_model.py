"""A recipe whose model keeps something from pass to pass, in ways of which no checkpoint tells. A plugin."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtf.api.layout import Layout
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.core.types import Batch
from dtf.model.metrics import weighted_sums
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
        if self.kind in ("none", "loss", "loss_counts") or not self.training:
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
    level = 0.0  # no option
    losses = 0
    soft: bool = option(default=False, doc="whether targets of training are probabilities")

    def build_model(self) -> nn.Module:
        return nn.Sequential(Keeping(self.kind), super().build_model())

    def layout(self, model: nn.Module) -> Layout:
        toy = super().layout(model[1])  # type: ignore[index]
        blocks = [tuple(f"1.{name}" for name in names) for names in toy.blocks]
        return Layout((("0",), *blocks), {f"1.{name}": split for name, split in toy.splits.items()})

    def open_data(self, split: str, seed: int) -> Dataset:
        rows = super().open_data(split, seed)
        return Soft(rows) if self.soft and split == "train" else rows

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        if self.kind == "loss":
            loss = super().loss(outputs, targets)
            self.level = 0.9 * self.level + 0.1 * float(loss.detach().mean())
            return loss / (1 + self.level)
        if self.kind == "loss_counts":
            self.losses += 1
            return super().loss(outputs, targets) * (0.5 if self.losses > 100 else 1.0)
        if not self.soft:
            return super().loss(outputs, targets)
        assert torch.is_grad_enabled() == (targets.dim() == 2), "rows of the other split"
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return (
            weighted_sums(batch.weight, loss, loss)
            if batch.targets.dim() == 2
            else super().measure(outputs, batch, loss)
        )


class Soft(Dataset):
    """Rows whose targets are a probability for each class."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._rows.fetch(ids, epoch)
        return inputs, nn.functional.one_hot(targets, 4).to(inputs)
