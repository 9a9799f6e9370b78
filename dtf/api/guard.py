"""The contract of what finds silent data corruption: it compares what replicas hold and compute. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dtf.core.types import Batch, StepOutput, Train

if TYPE_CHECKING:
    from collections.abc import Callable


class Guard(ABC):
    """Compares the replicas of a program. Every rank has one. Where they differ, CorruptionError is raised on all ranks
    alike, and names who is wrong where something tells.

    It changes nothing that the run computes.
    """

    @abstractmethod
    def compare_state(self) -> None:
        """Compare what replicas hold alike between two steps. Collective. Waits for the device."""

    @abstractmethod
    def step(self, turn: int, ticket: Train, batch: Batch | None, see: Callable[[str], None]) -> StepOutput:
        """A step, as of `Program.step`, of which all replicas compute one micro-batch before. Collective. Waits for the
        device. `turn`: the number of this guarded step; turns take the micro-batches in order. `see`: told what a
        person should know.
        """
