"""What to train, as a strategy gets it: the task, and the numbers that it may start or resume from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from dtf.api.optimizer import Optimizer
    from dtf.api.options import StepOptions
    from dtf.api.precision import Precision
    from dtf.api.recipe import Recipe
    from dtf.api.row_optimizer import RowOptimizer


class Weights(Protocol):
    """Numbers of a model, or of some of its tensors, on disk; see `dtf.model.pretrained`."""

    def __contains__(self, name: object) -> bool:
        """Whether it has the parameter or buffer of this full name, in the model's own shape."""
        ...

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The part at `offset` of `shape` (default: all), on CPU, in the format it is stored in; memory of its own.

        DataError when it cannot be read.
        """
        ...

    def source(self) -> Source | None:
        """The checkpoint they come from, which may hold sparse tables too; None for files of other programs."""
        ...

    @property
    def place(self) -> str:
        """Where they are, as it was given."""
        ...


@dataclass(frozen=True)
class Task:
    """What to train: everything a strategy needs to know of a run."""

    recipe: Recipe
    optimizer: Optimizer
    precision: Precision
    step: StepOptions
    seed: int
    sample: Callable[[int], Any] | None = None
    """Inputs of so many training rows, for strategies that look how a model computes before they divide it; only some
    ranks need to read data for it.
    """

    weights: Weights | None = None
    """Numbers to start from, in place of drawn ones."""

    rows: RowOptimizer | None = None
    """How rows of sparse tables learn; only recipes that have some need it."""


class Source(Protocol):
    """A checkpoint as a program reads it."""

    scalars: dict
    place: str  # what errors call it
    folder: Path  # where it is

    def names(self) -> set[str]:
        """Names of all tensors."""
        ...

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The part at `offset` of `shape` (default: all) of a global tensor, on CPU.

        DataError when absent or of another shape.
        """
        ...
