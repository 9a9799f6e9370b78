"""A toy model whose third layer marked rows do not use, or make slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.registry import option, register
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

HALF = 8
"""Of each 16 rows in a row the second half is marked."""


@register("recipe", "uneven")
class Uneven(Toy):
    """With the sampler `sequential` and batches of 16, rank 0 of 2 has no marked row, and rank 1 no other."""

    late: int = option(default=0, doc="rows before the first one that is marked")
    until: str = option(default="", doc="instead, all rows use all layers, and marked ones wait for this file")

    def build_model(self) -> nn.Module:
        return build(self.until)

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("first",), ("second",), ("third",), ("last",)))

    def open_data(self, split: str, seed: int) -> MarkedRows:
        return MarkedRows(self.rows if split == "train" else 16, split, self.late if split == "train" else 99)


class MarkedRows(Rows):
    """The first input of a row is 9 where it is marked, else 0."""

    def __init__(self, rows: int, split: str, late: int) -> None:
        super().__init__(rows, split, -1)
        self._late = late

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        inputs, targets = super().fetch(ids, epoch)
        rows = torch.from_numpy(ids)
        inputs = inputs.clone()
        inputs[:, 0] = ((rows >= self._late) & (rows % (2 * HALF) >= HALF)).float() * 9
        return inputs, targets


def build(until: str) -> nn.Module:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            marked = bool((x[:, 0] > 5).any())
            y = self.second(self.first(x).tanh()).tanh()
            while until and marked and self.training and not Path(until).exists():
                time.sleep(0.01)
            if until or not marked:
                y = self.third(y).tanh()
            return self.last(y)

    return Model()
