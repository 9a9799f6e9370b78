"""The contract of samplers: in which order an epoch visits its rows. A pure function of (seed, epoch), so that ranks
and restarts change nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Tail(Enum):
    """What becomes of the rows at the end of an epoch that do not fill a global batch: a smaller batch (`partial`), a
    batch completed with other rows (`fill`), or no batch (`drop`).
    """

    partial = "partial"
    fill = "fill"
    drop = "drop"


class Sampler(ABC):
    """Decides in which order rows are visited. Fields are the config node `sampler`. Torch-free."""

    tail: Tail

    once: bool = True
    """Whether each epoch visits each row exactly once."""

    repeats: bool = False
    """Whether `order` also gives ids from `rows` on, which stand for further views of a row. See `Dataset.repeats`."""

    def fingerprint(self) -> str:
        """Text that differs when anything outside these options that decides the order differs, such as a file.
        Default: empty, there is nothing.
        """
        return ""

    @abstractmethod
    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        """The row numbers of one epoch in the order in which they are visited, int64, at most `rows` of them.

        `groups`: the class of each row (rows,), where the data set has classes. A pure function of its arguments.
        """
