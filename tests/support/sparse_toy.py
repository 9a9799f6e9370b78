"""The toy recipe's counterpart with sparse tables: ids that repeat within a batch, that are missing, and that only some
ranks meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.api.sparse_table import Table
from dtf.model.metrics import weighted_sums
from tests.support.toy import EVAL_ROWS

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from dtf.core.types import Batch

FIELDS, WIDTH = 3, 5


@register("recipe", "tabled")
class Tabled(Recipe):
    rows: int = option(default=96, doc="training rows", unit="rows")
    size: int = option(default=0, doc="ids of the first table; 0: any")
    values: int = option(default=200, doc="ids of the first table that occur, where it has no size")
    scale: int = option(default=1, doc="all ids of a table without a size are times this")
    capacity: int = option(default=1000, doc="rows that the first table may hold")
    splits: bool = option(default=True, doc="whether tensor parallelism divides the layers")
    counts: bool = option(default=False, doc="whether the loss has a count for each row, in place of one")
    unmet: bool = option(default=False, doc="whether the ids of the second table are missing in all training rows")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def check(self) -> None:
        pass

    def tables(self) -> dict[str, Table]:
        return {"ids": Table(WIDTH, self.size, self.capacity, 0.5), "who": Table(2, 40, 40, 0.1)}

    def build_model(self) -> nn.Module:
        from torch import nn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.norm = nn.Linear(FIELDS * WIDTH + 2, 16, bias=False), nn.BatchNorm1d(16)
                self.drop, self.second, self.last = nn.Dropout(0.1), nn.Linear(16, 8), nn.Linear(8, 1)

            def forward(self, inputs: dict[str, Tensor]) -> Tensor:
                x = nn.functional.pad(inputs["ids"].flatten(1), (0, 2)) + nn.functional.pad(
                    inputs["who"].flatten(1), (FIELDS * WIDTH, 0)
                )
                x = self.second(self.drop(self.norm(self.first(x)).relu())).tanh()
                return self.last(x).flatten(0) + inputs["ids"].square().sum((1, 2)) + inputs["dense"]

        return Net()

    def layout(self, model: nn.Module) -> Layout:
        splits = {"first": Split.column, "norm": Split.local, "drop": Split.local, "second": Split.row}
        return Layout((("first", "norm"), ("drop",), ("second",), ("last",)), splits if self.splits else {})

    def open_data(self, split: str, seed: int) -> Dataset:
        return Clicks(
            self.rows if split == "train" else EVAL_ROWS, split, self.size or self.values, self.scale, self.unmet
        )

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        from torch.nn.functional import mse_loss

        losses = mse_loss(outputs, targets.to(outputs.dtype), reduction="none")
        return (losses, 1 + (targets > 0)) if self.counts else losses

    def clicks(self, targets: Tensor) -> Tensor:
        return targets > 0.5

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss)


class Clicks(Dataset):
    """Ids of a skewed distribution; one in ten is missing."""

    prefetch = 0

    def __init__(self, rows: int, split: str, values: int, scale: int, unmet: bool) -> None:
        import numpy as np

        random = np.random.default_rng(len(split))
        self._ids = np.floor(values * random.random((rows, FIELDS)) ** 3).astype(np.int64) * scale
        self._ids[random.random((rows, FIELDS)) < 0.1] = -1
        self._who = np.full((rows, 1), -1) if unmet else random.integers(0, 40, (rows, 1))
        self._dense, self._targets = random.random(rows), random.random(rows)

    def __len__(self) -> int:
        return len(self._targets)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        import torch

        named = {"ids": self._ids[ids], "who": self._who[ids], "dense": self._dense[ids]}
        return {name: torch.from_numpy(array) for name, array in named.items()}, torch.from_numpy(self._targets[ids])
