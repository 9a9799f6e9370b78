"""What to train, as a strategy gets it: the task, and the numbers that it may start or resume from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dtf.api.sparse_table import inputs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from dtf.api.optimizer import Optimizer
    from dtf.api.options import StepOptions
    from dtf.api.precision import Precision
    from dtf.api.recipe import Recipe
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.api.sparse_table import Placement


class Weights(Protocol):
    """Values of a model's tensors on disk, to start from. See `dtf.model.pretrained`."""

    def __contains__(self, name: object) -> bool:
        """Whether the file has the parameter or buffer of this full name, in the shape that the model gives it."""
        ...

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The part of a tensor at `offset` with shape `shape` (default: all of it). On CPU, in the format in which it
        is stored, in memory of its own.

        DataError when it cannot be read.
        """
        ...

    def source(self) -> Source | None:
        """The checkpoint that the values come from, which may hold sparse tables too. None for files of other
        programs.
        """
        ...

    @property
    def place(self) -> str:
        """The path, as the user gave it."""
        ...


@dataclass
class StartCheck:
    """What the check before the first step found in this process, or in an earlier run of the same. See
    `dtf.strategies.start_check`.
    """

    found: dict[str, str] | None = None
    """None: the check is to be made."""

    fresh: bool = False
    """Whether it was made in this process."""

    plans: dict[str, str] = field(default_factory=dict)
    """How strategies have divided the model at an earlier start of this run, by what they knew of it: a restart need
    not measure it again.
    """

    keep: Callable[[StartCheck], None] | None = None
    """To be called once all of it was made, where this process alone makes the check."""

    def passed(self, found: dict[str, str]) -> None:
        """The passes of training were checked, and nothing was refused. Those of an evaluation come after them."""
        self.found, self.fresh = found, True


@dataclass(frozen=True)
class Task:
    """What to train: all that a strategy needs to know of a run."""

    recipe: Recipe
    optimizer: Optimizer
    precision: Precision
    step: StepOptions
    seed: int
    sample: Callable[[int], Any] | None = None
    """Inputs of so many training rows, for strategies that measure how a model computes before they divide it. Reads
    data only when it is called.
    """

    weights: Weights | None = None
    """Values to start from, in place of initialisation. None: the recipe initialises the model."""

    rows: RowOptimizer | None = None
    """The optimizer of the rows of sparse tables. Only recipes that have such tables need it."""

    built: list[nn.Module] = field(default_factory=list)
    """The model, where this process has built it already; whoever takes it takes it out. See `dtf.model.init`."""

    start_check: StartCheck = field(default_factory=StartCheck)

    channels_last: bool | None = None
    """Whether images have their channels last in memory, or first, as `step.memory_format` says or the model bears.
    None: as the recipe gives them.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)
    """What `strategy.tables=auto` has come to for each sparse table; empty: nothing was measured, rows are divided."""

    compiled: tuple[str, ...] = ()
    """Names of the modules that `step.compile` has chosen; "" is the model."""

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Names of the inputs that hold ids of sparse tables."""
        return tuple(inputs_of(self.recipe.tables()))


class Source(Protocol):
    """A checkpoint, as programs and updates read it. Any rank may read any part of any tensor."""

    scalars: dict  # JSON values that the checkpoint holds beside tensors
    place: str  # its name in errors
    folder: Path

    def names(self) -> set[str]:
        """The names of all tensors."""
        ...

    def read(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        whole: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The part at `offset` with shape `shape` of a global tensor of shape `whole` (default: all of it), on CPU. Who
        reads a part says `whole`: a part of a larger tensor would fit too.

        DataError when the checkpoint has no such tensor, or one of another shape, or a damaged one.
        """
        ...

    def read_into(
        self, name: str, out: Tensor, offset: tuple[int, ...] | None = None, whole: tuple[int, ...] | None = None
    ) -> None:
        """Fill `out` with the part at `offset` of a tensor of shape `whole` (default: `out` has the whole tensor). As
        `read`, without memory of its own where `out` has the stored format. What `out` holds after a DataError is of
        no use.
        """
        ...
