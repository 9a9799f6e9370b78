"""Rows of a log whose targets also hold their group, so that metrics of groups need no inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Dataset


class Grouped(Dataset):
    """`rows` with targets (B, 2) float64: 1 for a click or 0, and the id of `field`.

    Of a raw id of 63 bits the last ten are rounded away.
    """

    def __init__(self, rows: Dataset, field: int) -> None:
        self._rows, self._field = rows, field
        self.wrapped = rows
        self.prefetch, self.queue_rows, self.threads = rows.prefetch, rows.queue_rows, rows.threads
        self.bad, self.allowed = rows.bad, rows.allowed

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        inputs, clicks = self._rows.fetch(ids, epoch)
        return inputs, torch.stack([clicks.double(), inputs["ids"][:, self._field].double()], 1)

    def runs(self) -> np.ndarray | None:
        return self._rows.runs()

    def best_possible(self) -> dict[str, float]:
        return self._rows.best_possible()

    def fingerprint(self) -> str:
        return f"{self._rows.fingerprint()}, groups of field {self._field}"
