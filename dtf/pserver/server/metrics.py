"""What trainers report beside gradients: metrics, sample ids, and the number of unreadable rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from dtf.core.types import StepOutput
from dtf.pserver.push import Push


class MetricAccumulator:
    """Sums over pushes since the last `take`. `metrics`: M, how many numbers a push's metric sums have, see
    `StepOutput`.
    """

    def __init__(self, metric_count: int) -> None:
        self._metric_count = metric_count
        self._unread: Counter[tuple[str, int]] = Counter()
        self._consumed: list[tuple[int, np.ndarray]] = []
        self._clear()

    def add(self, push: Push) -> None:
        """Add what came with one push."""
        self._sums += torch.from_numpy(push.sums)
        self._unread["train", push.epoch] += push.unread
        self._consumed.append((push.step, push.ids))

    def add_norm(self, norm: Tensor) -> None:
        """Add the gradient norm of an update, (2,) [norm, 1], or a sum of several."""
        self._norms += norm.cpu().double()

    def add_eval_unread(self, unread: int) -> None:
        """Add the number of unreadable rows of an evaluation batch."""
        self._unread["eval", 0] += unread

    def begin_evaluation(self) -> None:
        """Start to count the unreadable rows of an evaluation anew."""
        self._unread["eval", 0] = 0

    def unread(self, split: str, epoch: int) -> int:
        """See `strategy.Program`."""
        return self._unread[split, epoch]

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        """See `strategy.Program`."""
        consumed, self._consumed = self._consumed, []
        return consumed

    def take(self) -> StepOutput:
        """Return the sums and set them to zero."""
        output = StepOutput(self._sums, self._norms)
        self._clear()
        return output

    def _clear(self) -> None:
        self._sums = torch.zeros(self._metric_count, dtype=torch.float64)
        self._norms = torch.zeros(2, dtype=torch.float64)
