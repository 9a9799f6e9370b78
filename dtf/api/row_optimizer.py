"""The contract of row optimizers: how the rows of sparse tables that a step touched learn from their gradients.

Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dtf.api.registry import option

if TYPE_CHECKING:
    import numpy as np


DEFAULT = "adagrad"
"""What the root config chooses; a recipe without sparse tables takes no other."""


@dataclass(kw_only=True)
class RowOptimizer(ABC):
    """Fields are the config node `sparse`. Modules import numpy and numba only inside methods."""

    bound: ClassVar[tuple[str, ...]] = ()
    """Fields that the state of rows was made with and is read with: a run goes on with the same. Default: none."""

    averages_squares = False
    """As of `optimizer.Optimizer`."""

    def check(self) -> None:
        """Raise ConfigError for values that do not go together."""
        return

    def rate(self, lr: float) -> float:
        """The learning rate of rows, `lr` being the schedule's. Default: that."""
        return lr

    def shrinkage(self, lr: float) -> float:
        """Logarithm of what a step multiplies every row by, touched or not; the table catches up on it when it next
        needs a row. Default: 0.
        """
        return 0.0

    @abstractmethod
    def states(self, width: int) -> dict[str, tuple[int, float]]:
        """What is kept for a row of `width` numbers: name -> (how many numbers, their first value), in the order of the
        columns below.
        """

    @abstractmethod
    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        """One step in place on the rows at `positions` (U,) int64, distinct; -1 stands for none.

        `records` (rows, width + states) float32 or float64, row and states side by side; `gradients` (U, width) of the
        same dtype, to be multiplied by `factor`; `lr`: see `rate`; `step` counts the steps before, without those that
        were skipped. Threads call this for disjoint positions.
        """


@dataclass(kw_only=True)
class Scheduled(RowOptimizer):
    """One whose rows learn at the schedule's pace."""

    lr_factor: float = option(
        default=1.0, above=0, most=1_000_000, doc="learning rate of sparse tables, as a multiple of the schedule's"
    )

    def rate(self, lr: float) -> float:
        return lr * self.lr_factor
