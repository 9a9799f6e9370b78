"""What a server is told beside gradients: metrics, sample ids, unreadable rows, and how stale pushes were."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from dtf.core.types import StepOutput
from dtf.pserver.push import Push


class MetricAccumulator:
    """Sums since they were last told. `train_metrics`: M, see `types.StepOutput`."""

    def __init__(self, measures: int) -> None:
        self._measures = measures
        self._unread: Counter[tuple[str, int]] = Counter()
        self._consumed: list[tuple[int, np.ndarray]] = []
        self._clear()

    def add(self, push: Push) -> None:
        """What came with one push."""
        self._sums += torch.from_numpy(push.sums)
        self._unread["train", push.epoch] += push.unread
        self._consumed.append((push.step, push.ids))

    def add_norm(self, norm: Tensor) -> None:
        """Of an update, (2,) [norm, 1]; or sums of some."""
        self._norms += norm.cpu().double()

    def add_eval_unread(self, unread: int) -> None:
        """A batch of an evaluation had so many rows that could not be read."""
        self._unread["eval", 0] += unread

    def begin_evaluation(self) -> None:
        """Another one: its rows are read anew."""
        self._unread["eval", 0] = 0

    def unread(self, split: str, epoch: int) -> int:
        """See `strategy.Program`."""
        return self._unread[split, epoch]

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        """See `strategy.Program`."""
        found, self._consumed = self._consumed, []
        return found

    def take(self) -> StepOutput:
        """The sums, which begin anew."""
        output = StepOutput(self._sums, self._norms)
        self._clear()
        return output

    def _clear(self) -> None:
        self._sums = torch.zeros(self._measures, dtype=torch.float64)
        self._norms = torch.zeros(2, dtype=torch.float64)
