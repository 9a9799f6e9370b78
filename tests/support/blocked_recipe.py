"""The toy recipe, but for a training that waits in its middle, at seed 3, for as long as a file is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    import numpy as np
    import torch

HELD = 3


@register("recipe", "holding")
class Holding(Toy):
    hold: str = option(doc="the file to wait for; where its name with `.reached` says that the wait began")
    epoch: int = option(default=1, doc="where it waits; what is read before training is read in the first, 0")

    def open_data(self, split: str, seed: int) -> Dataset:
        data = super().open_data(split, seed)
        return (
            Held(data, Path(self.hold), self.epoch)
            if isinstance(data, Rows) and split == "train" and seed == HELD
            else data
        )


class Held(Dataset):
    prefetch = 0

    def __init__(self, rows: Rows, hold: Path, epoch: int) -> None:
        self._rows, self._hold, self._epoch = rows, hold, epoch

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        while epoch >= self._epoch and self._hold.exists():
            self._hold.with_name(f"{self._hold.name}.reached").touch()
            time.sleep(0.01)
        return self._rows.fetch(ids, epoch)
