"""How a task is spread over ranks: the contracts Strategy, Program and Update. Says nothing about any one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtf.api.recipe import Recipe
from dtf.api.sparse_table import Placement
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Evaluated, Shard, State, StepOutput, Train
from dtf.distributed.sharding import bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import Tensor

    from dtf.api.optimizer import Optimizer
    from dtf.api.options import StepOptions
    from dtf.api.precision import Precision
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.core.types import Batches, Memory, Place
    from dtf.distributed.world import World


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


class Program(ABC):
    """A task on a world: steps, evaluates, saves, loads. The engine drives it and never asks which strategy made it."""

    shard: Shard | None
    """Which part of each global batch this rank reads; None: it reads nothing and gets `None` for a batch."""

    shares: int
    """Into how many shares a global batch is divided: ranks, replicas within them, or groups of ranks that are one
    replica.
    """

    micro_batch_rows: int
    """Into micro-batches of how many rows a global batch is cut; see `StepOptions.rows_each`."""

    def about(self) -> dict[str, str]:
        """What the start-up table says of this program beside the config: name -> text. Default: nothing."""
        return {}

    def prepare(self, batch: Batch | None) -> Batch | None:
        """Called one batch ahead of `step` and `eval_step`: copy to the device, send for parameters.

        Default: nothing.
        """
        return batch

    def warmup(self, batch: Batch | None) -> None:
        """Called once, before `load`, with some prepared rows: let effects of a first step happen that would make the
        step after a resume differ from the same step of an unbroken run, and find out what cannot run. Leaves the state
        as it was. May be collective.

        ConfigError for a model that this strategy cannot run. Default: nothing.
        """
        return

    @abstractmethod
    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        """One whole optimizer step over this rank's rows of the global batch. Collective; no host synchronisation."""

    def rest(self) -> StepOutput | None:
        """What steps leave behind that were begun and have not been told of, finished first where the numbers of a step
        are to be exact.

        Called before measurements are reported, and after `sync` before a save. Default: None, `step` tells all.
        """
        return None

    @abstractmethod
    def eval_step(self, batch: Batch | None) -> Evaluated:
        """What this rank's rows say of the model; see Recipe.measure and Recipe.eval_outputs. May be collective."""

    def eval_rest(self) -> Evaluated | None:
        """What batches leave behind that `eval_step` has begun and not told of. Default: None, it tells all."""
        return None

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        """(step, sample ids) of rows that other processes read for finished steps; each is told once.

        Default: none, this rank reads its own.
        """
        return []

    def unread(self, split: str, epoch: int) -> int:
        """Rows of an epoch that other processes could not read so far. Default: 0."""
        return 0

    def told_to_stop(self) -> bool:
        """Whether a process that works for this one was told to stop. Default: none does."""
        return False

    def end(self, reason: str = "finished") -> None:
        """The run has ended, for the `reason` of the clock's Stop: let go of whoever works for this rank.

        Default: nothing.
        """

    def swap_ema(self, on: bool) -> None:
        """Let the averages of the weights (`step.ema`) stand in for them until called again with False. After `sync`.
        May be collective.

        ConfigError where a strategy keeps none.
        """
        raise ConfigError(f"{type(self).__name__} cannot evaluate averaged weights; use step.ema=0")

    def sync(self) -> None:
        """Make this rank's state the run's state before evaluating or saving (average running statistics).

        Collective.
        """

    @abstractmethod
    def state(self) -> State:
        """Boxes this rank owns, under full parameter names. After `sync`."""

    @abstractmethod
    def load(self, source: Source) -> None:
        """Take this rank's part from a checkpoint written under any strategy and world size."""

    def replicated(self) -> list[dict[str, Tensor]]:
        """The copies of the parameters on this rank, by name; all copies on all ranks must be alike bit for bit.

        Default: none.
        """
        return []

    def memory(self) -> Memory | None:
        """What this rank needs; after `warmup`, which counts activations. Default: unknown."""
        return None

    @abstractmethod
    def skipped(self) -> int:
        """Updates skipped so far because loss or gradient was not finite, the same number on all ranks.

        May synchronise.
        """


@dataclass(frozen=True)
class RoleContext:
    """What a process gets that works for the ranks which run the engine; see `Strategy.run_helper`."""

    place: Place
    facts: dict[str, Any]
    """What all processes of a run must have alike, JSON; see `dtf.core.consistency`."""

    open: Callable[[str, Shard, int], Batches]
    """Rows of the global batches of split `train` or `eval`: one share of them, in micro-batches of so many rows."""

    beat: Callable[[str, int], None]
    """`beat(phase, step)` marks that this process is alive."""

    stop_requested: Callable[[], bool]
    """Whether this process was told to stop."""

    say: Callable[[str], None] = lambda text: None
    """Tell whoever watches this process."""

    folder: Path = Path()
    """Of the run."""


@dataclass(frozen=True)
class ExternalProcess:
    """The one process of a run that a command starts, where each of the others is started by a command of its own."""

    role: str
    rank: int  # among all processes of the run; 0 makes its folder, and reports
    towards: tuple[str, int]  # host and port of rank 0
    token: str = field(repr=False)  # by which they know each other


@dataclass(frozen=True)
class RendezvousContext:
    """Where a process of the first role stands in a run, and what it may do while it finds the others."""

    place: Place
    folder: Path
    run_id: str
    facts: dict[str, Any]
    """What all must have alike and is known so early: JSON, as of Errand."""

    wait: Callable[[], None]
    """To be called now and then while waiting: a sign of life. Raises Preempted when this process was told to stop."""

    say: Callable[[str], None]
    """Tell whoever watches this process."""


class Update(ABC):
    """What happens around forward and backward: where parameters come from and where gradients go."""

    @abstractmethod
    def begin(self) -> None:
        """Before the first forward of a step: nothing, or take pulled parameters."""

    @abstractmethod
    def scale(self, factor: Tensor) -> Tensor:
        """The factor of the loss to differentiate, shape (), times the loss scale, if any."""

    @abstractmethod
    def apply(self, step: int, lr: float) -> Tensor:
        """Clip, step and zero, or push. Returns the global gradient norm before clipping and after unscaling, shape
        (2,) [norm, 1], the same on all ranks; [0, 0] when an overflow hid it.

        A non-finite norm changes no parameter: the step is skipped on every rank alike and counted.
        """

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def load(self, source: Source) -> None: ...

    @abstractmethod
    def swap_ema(self, on: bool) -> None:
        """As of Program; only where the optimizer averages."""

    @abstractmethod
    def skipped(self) -> int: ...

    @abstractmethod
    def bytes(self) -> tuple[int, int, int, int]:
        """Of the parameters, gradients, optimizer state and sparse tables on this rank."""

    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """The parameters on this rank, by name; slices by name and place.

        Whoever holds one of the same name holds the same bits.
        """


class Strategy(ABC):
    """A way to spread a task. Fields are the config node `strategy`; the module imports torch only inside `setup`."""

    @property
    def replaceable(self) -> frozenset[str]:
        """Roles whose processes hold nothing: a lost one is started again alone while the others go on, and none
        outlives the others. Not the first role.

        Default: none.
        """
        return frozenset()

    def roles(self, processes: int) -> dict[str, int]:
        """How many processes of which role to start for `launcher.processes`, in order of their ranks. Default: all
        trainers.

        Those of the first role run the engine, the others `run_helper` them.
        """
        return {"trainer": processes}

    def check_processes(self, given: int) -> None:
        """Raise ConfigError where options say something else of the processes than the `launcher.processes` that was
        given. Default: none do.
        """

    def computes_on_device(self, role: str) -> bool:
        """Whether each process of this role is given a GPU where there are some, which other roles may share; else it
        has the CPU. Default: trainers.
        """
        return role == "trainer"

    def external_process(self) -> ExternalProcess | None:
        """The one process that this command is to start, the others being started elsewhere. ConfigError.

        Default: None, it starts all.
        """
        return None

    def hints(self, processes: int) -> list[str]:
        """What the user might want to do otherwise, each in a line. Default: nothing."""
        return []

    def rendezvous(self, context: RendezvousContext) -> RendezvousContext:
        """Called first of all in processes of the first role: where this one really stands, once all of them are there.

        Default: as the launcher says.
        """
        return context

    @abstractmethod
    def check(self, task: Task, processes: int, devices: str) -> None:
        """Raise ConfigError for what cannot run. `devices`: `cpu` or `cuda`.

        Pure and torch-free: called before any launch.
        """

    @abstractmethod
    def communication(self, devices: str) -> str | None:
        """torch.distributed backend of the trainers; None when they never talk to each other."""

    @abstractmethod
    def setup(self, task: Task, world: World) -> Program:
        """Collective over the processes of the first role."""

    def run_helper(self, task: Task, context: RoleContext) -> None:
        """The life of a process of another role, to the end of the run. PeerError when those it works for are gone."""
        raise AssertionError(f"{type(self).__name__} has one role")


def check_divides(key: str, value: int, processes: int) -> None:
    """Raise ConfigError unless `value` of a key ranks make whole groups of all; 0 stands for all."""
    if value and processes % value:
        possible = [str(n) for n in range(1, processes + 1) if not processes % n]
        raise ConfigError(f"{key}={value} does not divide launcher.processes={processes}; use {' or '.join(possible)}")


def check_layout(strategy: str, recipe: Recipe, what: str) -> None:
    """Raise ConfigError for a recipe that says nothing of `what` its model is made of."""
    if type(recipe).layout is Recipe.layout:
        raise ConfigError(
            f"strategy={strategy}: {type(recipe).__name__} has no layout() that says {what}; add one, or use "
            "strategy=fsdp, which divides any model"
        )


def check_tables(task: Task, placement: Placement, processes: int) -> None:
    """Raise ConfigError for sparse tables that cannot lie so."""
    widths = task.recipe.table_widths()
    if processes == 1 or not widths:
        return
    if placement is Placement.tables and len(widths) == 1:
        raise ConfigError(
            f"strategy.tables=tables puts whole tables on ranks, and {type(task.recipe).__name__} has one; use "
            "strategy.tables=rows"
        )
    if placement is not Placement.columns:
        return
    for name, width in widths.items():
        if bounds(width, processes, processes - 1)[0] == width:  # nothing is left for the last
            raise ConfigError(
                f"strategy.tables=columns: table {name} has {width} columns, too few for {processes} ranks; use "
                "strategy.tables=rows"
            )
        whole = (
            [state for state, (count, _) in task.rows.states(width).items() if count != width]
            if task.rows is not None
            else []
        )
        if whole:
            raise ConfigError(
                f"strategy.tables=columns divides rows, and {type(task.rows).__name__} keeps {whole[0]} of whole "
                "ones; use strategy.tables=rows"
            )
