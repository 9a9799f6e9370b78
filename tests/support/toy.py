"""A recipe small enough to run in milliseconds that has what breaks strategies: batch statistics, dropout, a norm
without running averages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from dtf.core.types import Batch

EVAL_ROWS = 20
"""In micro-batches of 5 as many on each of two ranks, while two of 3 have one less than the other, and get padding."""


@register("recipe", "toy")
class Toy(Recipe):
    model: FineTuning = option(factory=FineTuning, doc="what is learned")
    rows: int = option(default=96, doc="training rows", unit="rows")
    dropout: float = option(default=0.1, doc="share of activations dropped")
    batch_norm: bool = option(default=True, doc="whether batch statistics are used")
    bad_row: int = option(default=-1, doc="a training row whose input is infinite; -1: none")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "top1")

    @property
    def objective(self) -> tuple[str, str]:
        return ("top1", "max")

    def check(self) -> None:
        pass

    def build_model(self) -> nn.Module:
        from torch import nn

        norm = [nn.BatchNorm1d(16)] if self.batch_norm else []
        drop = [nn.Dropout(self.dropout)]
        return nn.Sequential(
            nn.Linear(8, 16, bias=not self.batch_norm),
            *norm,
            nn.ReLU(),
            *drop,
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 4),
        )

    def layout(self, model: nn.Module) -> Layout:
        first, second, third, last = (
            name for name, module in model.named_children() if type(module).__name__ == "Linear"
        )
        norm, drop = (("1",), "3") if self.batch_norm else ((), "2")
        splits = {
            first: Split.column,
            **dict.fromkeys([*norm, drop], Split.local),
            second: Split.row,
            last: Split.classes,
        }
        return Layout(((first, *norm, drop), (second, str(int(second) + 1)), (third,), (last,)), splits)

    def open_data(self, split: str, seed: int) -> Dataset:
        return Rows(self.rows if split == "train" else EVAL_ROWS, split, self.bad_row if split == "train" else -1)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        from dtf.model import losses

        return losses.cross_entropy(outputs, targets)

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        from dtf.model import losses

        return weighted_sums(batch.weight, loss, losses.target_rank(outputs, batch.targets) == 1)


class Rows(Dataset):
    """Gaussian rows labelled by a fixed linear map."""

    prefetch = 0

    def __init__(self, rows: int, split: str, bad_row: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(len(split))
        self._inputs = torch.randn(rows, 8, generator=generator)
        weights = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
        self._targets = (self._inputs @ weights).argmax(-1)
        if bad_row >= 0:
            self._inputs[bad_row] = torch.inf

    def __len__(self) -> int:
        return len(self._targets)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows = torch.from_numpy(ids)
        return self._inputs[rows], self._targets[rows]
