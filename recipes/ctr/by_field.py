"""Rows of a log with an input for each field, so that each has a table of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Dataset
from dtf.core.nest import Bags


class ByField(Dataset):
    """`rows` with the inputs `names` in place of `ids` and `bags`: (B, 1) each, or Bags with lengths (B, 1)."""

    def __init__(self, rows: Dataset, names: Sequence[str]) -> None:
        self._rows, self._names = rows, list(names)
        self.wrapped = rows
        self.prefetch, self.queue_rows, self.threads = rows.prefetch, rows.queue_rows, rows.threads
        self.bad, self.allowed = rows.bad, rows.allowed

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        inputs, targets = self._rows.fetch(ids, epoch)
        rest = {name: value for name, value in inputs.items() if name not in ("ids", "bags")}
        fields = [*inputs["ids"].split(1, 1)] if "ids" in inputs else []
        fields += _each(inputs["bags"]) if "bags" in inputs else []
        return rest | dict(zip(self._names, fields, strict=True)), targets

    def runs(self) -> np.ndarray | None:
        return self._rows.runs()

    def best_possible(self) -> dict[str, float]:
        return self._rows.best_possible()

    def fingerprint(self) -> str:
        return self._rows.fingerprint()


def _each(bags: Bags) -> list[Bags]:
    """The bags of each field."""
    fields = torch.arange(bags.lengths.shape[1]).repeat(len(bags.lengths)).repeat_interleave(bags.lengths.view(-1))
    return [
        Bags(bags.values[fields == field], lengths.contiguous())
        for field, lengths in enumerate(bags.lengths.split(1, 1))
    ]
