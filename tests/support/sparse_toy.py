"""The toy recipe's counterpart with sparse tables: ids that repeat within a batch, that are missing, and that only some
ranks meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.api.sparse_table import Pooling, Table
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
    bags: bool = option(
        default=False, doc="whether there are inputs of several ids, pooled in each way; some share a table"
    )
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
        if not self.bags:
            return {"ids": Table(WIDTH, self.size, self.capacity, 0.5), "who": Table(2, 40, 40, 0.1)}
        return {
            "ids": Table(WIDTH, self.size, self.capacity, 0.5, ("ids", "tags"), Pooling.mean),
            "who": Table(2, 40, 40, 0.1, pooling=Pooling.max),
            "words": Table(3, 0, 300, 0.3, ("words", "more"), Pooling.sum),
        }

    def build_model(self) -> nn.Module:
        from torch import nn

        bags = self.bags

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.norm = nn.Linear(FIELDS * WIDTH + 2, 16, bias=False), nn.BatchNorm1d(16)
                self.drop, self.second, self.last = nn.Dropout(0.1), nn.Linear(16, 8), nn.Linear(8, 1)

            def forward(self, inputs: dict[str, Tensor]) -> Tensor:
                x = nn.functional.pad(inputs["ids"].flatten(1), (0, 2)) + nn.functional.pad(
                    inputs["who"].flatten(1), (FIELDS * WIDTH, 0)
                )
                rest = inputs["dense"]
                if bags:  # (B, 2, WIDTH), (B, 3) and (B, 2, 3)
                    x = x + nn.functional.pad(inputs["tags"].flatten(1), (0, x.shape[1] - 2 * WIDTH))
                    rest = rest + inputs["words"].square().sum(1) + (inputs["more"][:, 0] * inputs["more"][:, 1]).sum(1)
                x = self.second(self.drop(self.norm(self.first(x)).relu())).tanh()
                return self.last(x).flatten(0) + inputs["ids"].square().sum((1, 2)) + rest

        return Net()

    def layout(self, model: nn.Module) -> Layout:
        splits = {"first": Split.column, "norm": Split.local, "drop": Split.local, "second": Split.row}
        return Layout((("first", "norm"), ("drop",), ("second",), ("last",)), splits if self.splits else {})

    def open_data(self, split: str, seed: int) -> Dataset:
        rows = self.rows if split == "train" else EVAL_ROWS
        return Clicks(rows, split, self.size or self.values, self.scale, self.unmet, self.bags)

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        from torch.nn.functional import mse_loss

        losses = mse_loss(outputs, targets.to(outputs.dtype), reduction="none")
        return (losses, 1 + (targets > 0)) if self.counts else losses

    def clicks(self, targets: Tensor) -> Tensor:
        return targets > 0.5

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss)


class Clicks(Dataset):
    """Ids of a skewed distribution; one in ten is missing. Bags of 0 to 4 ids, and one of 60."""

    prefetch = 0

    def __init__(self, rows: int, split: str, values: int, scale: int, unmet: bool, bags: bool) -> None:
        import numpy as np

        random = np.random.default_rng(len(split))
        self._ids = np.floor(values * random.random((rows, FIELDS)) ** 3).astype(np.int64) * scale
        self._ids[random.random((rows, FIELDS)) < 0.1] = -1
        self._who = np.full((rows, 1), -1) if unmet else random.integers(0, 40, (rows, 1))
        self._dense, self._targets = random.random(rows), random.random(rows)
        self._bags: dict[str, list[list[np.ndarray]]] = {}
        for name, count, most in (
            (("tags", 2, values), ("who", 1, 40), ("words", 1, 90), ("more", 2, 90)) if bags else ()
        ):
            lengths = random.integers(0, 5, (rows, count))
            lengths[rows // 2] = 60
            drawn = [[random.integers(-1, most, length) for length in row] for row in lengths]
            self._bags[name] = [
                [np.where(bag < 0, -1, bag * (scale if name == "tags" else 1)) for bag in row] for row in drawn
            ]

    def __len__(self) -> int:
        return len(self._targets)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[dict[str, Any], torch.Tensor]:
        import numpy as np
        import torch

        from dtf.core.nest import Bags

        named = {"ids": self._ids[ids], "who": self._who[ids], "dense": self._dense[ids]}
        inputs: dict[str, Any] = {name: torch.from_numpy(array) for name, array in named.items()}
        for name, rows in self._bags.items():
            bags = [bag for row in ids for bag in rows[row]]
            lengths = torch.tensor([len(bag) for bag in bags]).view(len(ids), -1)
            inputs[name] = Bags(
                torch.from_numpy(np.concatenate(bags)), lengths if lengths.shape[1] > 1 else lengths[:, 0]
            )
        return inputs, torch.from_numpy(self._targets[ids])
