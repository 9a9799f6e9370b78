"""The contract of row optimizers: how the rows of sparse tables that a step touched are updated from their gradients.

Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dtf.api.registry import option
from dtf.api.row_life import RowLife
from dtf.api.row_storage import RowStorage

if TYPE_CHECKING:
    import numpy as np


DEFAULT = "adagrad"
"""The choice of the root config. A recipe without sparse tables accepts no other."""


@dataclass(kw_only=True)
class RowOptimizer(RowLife, RowStorage, ABC):
    """Updates rows of sparse tables. Fields are the config node `sparse`. Modules import numpy and numba only inside
    methods.
    """

    bound: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that the meaning of stored row state depends on. A resumed run must keep their values.
    Default: none.
    """

    averages_squares = False
    """As `Optimizer.averages_squares`."""

    def check(self) -> None:
        """Raise ConfigError for values that contradict each other."""
        return

    def check_rows(self) -> None:
        """Raise KeyProblem for options of all row optimizers that contradict each other."""
        self.check_life()
        self.check_storage()

    def rate(self, lr: float) -> float:
        """The learning rate of rows. `lr`: that of the schedule. Default: the same."""
        return lr

    def shrinkage(self, lr: float) -> float:
        """The logarithm of the factor by which a step multiplies every row, touched or not (weight decay). The table
        applies it to a row when it next reads that row. Default: 0.
        """
        return 0.0

    @property
    def decays(self) -> bool:
        """Whether steps shrink all rows, see `shrinkage`."""
        return bool(self.shrinkage(self.rate(1e-9)))

    def record_columns(self, width: int) -> int:
        """How many numbers a row of `width` numbers has with its state."""
        return width + sum(count for count, _ in self.states(width).values())

    @property
    def extra_bytes(self) -> int:
        """What a row on disk takes beside its id, its numbers and its state."""
        return 8 * self.decays + 8 * self.lives

    @abstractmethod
    def states(self, width: int) -> dict[str, tuple[int, float]]:
        """The state of a row of `width` numbers: name -> (how many numbers, their first value), in the order of the
        columns of `records`.
        """

    @abstractmethod
    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        """One step in place on the rows at `positions` (U,) int64, which are distinct; -1 stands for no row.

        `records` (rows, width + states), float32 or float64: each row and its state side by side. `gradients` (U,
        width), same dtype, are multiplied by `factor`. `lr`: see `rate`. `step`: how many steps came before, without
        skipped ones. Threads call this for disjoint positions.
        """


@dataclass(kw_only=True)
class Scheduled(RowOptimizer):
    """A row optimizer whose learning rate follows the schedule."""

    lr_factor: float = option(
        default=1.0, above=0, most=1_000_000, doc="learning rate of sparse tables, as a multiple of the schedule's"
    )

    def rate(self, lr: float) -> float:
        return lr * self.lr_factor
