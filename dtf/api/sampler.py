"""Which rows make up which global batch: a pure function of (seed, epoch, index). Ranks and restarts change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Tail(Enum):
    partial = "partial"
    fill = "fill"
    drop = "drop"


class Sampler(ABC):
    """Fields are the config node `sampler`. Torch-free."""

    tail: Tail

    once: bool = True
    """Whether each epoch visits each row exactly once."""

    repeats: bool = False
    """Whether ids from `rows` on occur: further views of a row, see `Dataset.repeats`."""

    def fingerprint(self) -> str:
        """Text that differs when what the order is drawn from, beside these options, does. Default: nothing else is."""
        return ""

    @abstractmethod
    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        """Row numbers of one epoch in the order they are visited, int64.

        `groups`: class of each row (rows,), where the data set has classes.
        """
