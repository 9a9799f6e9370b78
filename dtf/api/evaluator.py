"""Metrics that are no sums: the contract of evaluators, and what they may ask of other ranks. Torch for types alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Peers(Protocol):
    """The collective operations that an evaluator may use. See `dtf.World`, which has them."""

    def reduce(self, sums: Tensor) -> Tensor:
        """Sum a CPU tensor over ranks, in place; the same on all ranks. Collective."""
        ...

    def collect(self, rows: Tensor) -> Tensor | None:
        """The rows of all ranks, (R, ...) of any R each, in order of rank on rank 0; None on other ranks.
        Collective.
        """

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. Collective."""


class Evaluator(ABC):
    """Computes metrics that are no sums, such as AUC, from the rows of one evaluation. Each rank has one evaluator."""

    @abstractmethod
    def add(self, rows: Tensor) -> None:
        """Take rows (R, K) of this rank as `Recipe.eval_outputs` gives them, on the device. No host synchronisation."""

    @abstractmethod
    def values(self, peers: Peers) -> dict[str, float]:
        """The metrics of the rows of all ranks, by name; the same on all ranks. Called once, after the last `add`.
        Collective.
        """
