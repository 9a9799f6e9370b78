"""The contracts of a strategy: how it spreads a task over ranks (Strategy), what it makes of it (Program), and where
parameters come from and gradients go (Update). Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.recipe import Recipe
from dtf.api.sparse_table import Placement
from dtf.api.task import Source, Task
from dtf.core.errors import ConfigError
from dtf.core.renamed import accept_old_names
from dtf.core.types import Batch, Evaluated, Shard, State, StepOutput, Train
from dtf.distributed.sharding import bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import Tensor

    from dtf.core.types import Batches, Memory, Place
    from dtf.distributed.world import World


class Program(ABC):
    """A task on a world of ranks. It steps, evaluates, saves and loads.

    The engine drives a program and never asks which strategy made it. A step is one whole optimizer step.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_names(Program, cls, {"rehearse": "warmup", "settle": "sync", "use_averages": "swap_ema"})

    shard: Shard | None
    """The part of each global batch that this rank reads. None: it reads nothing, and gets None for a batch."""

    shares: int
    """Into how many shares a global batch is divided. A share belongs to a rank, to a replica within a rank, or to a
    group of ranks that form one replica.
    """

    micro_batch_rows: int
    """Rows of each micro-batch that a global batch is cut into. See `StepOptions.rows_each`."""

    @property
    def evaluation_micro_batches(self) -> int:
        """How many micro-batches of an evaluation are computed at once. Default: one for each share."""
        return self.shares

    def about(self) -> dict[str, str]:
        """What the start-up table says of this program beside the config: name -> text. Default: nothing."""
        return {}

    def prepare(self, batch: Batch | None) -> Batch | None:
        """Copy a batch to the device, or send requests for its parameters. Called one batch ahead of `step` and
        `eval_step`, with None on a rank that reads nothing. Returns what these two get.

        Default: the batch as it is.
        """
        return batch

    def warmup(self, batch: Batch | None) -> None:
        """Run a trial step on some prepared rows. Called once, before `load`. May be collective.

        It brings forward the effects of a first step that would make the step after a resume differ from the same step
        of an uninterrupted run, and it finds what cannot run. It leaves the state unchanged. ConfigError for a model
        that this strategy cannot run. Default: nothing.
        """
        return

    def trial_eval(self, batch: Batch | None) -> Evaluated | None:
        """As `eval_step` for a few prepared rows that are the same on all ranks, without a trace in the model. Called
        after `warmup`, on all ranks. Default: None, nothing is tried.
        """
        return None

    @abstractmethod
    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        """One whole optimizer step over this rank's rows of the global batch. Collective, without host synchronisation.

        `batch`: what `prepare` returned, B rows of this rank. Returns the metric sums (M,) and the gradient norm, on
        the device.
        """

    def rest(self) -> StepOutput | None:
        """The sums of steps that were begun and not yet returned by `step`. Where the numbers of a step are to be
        exact, they are finished first.

        Called before measurements are reported, and after `sync` before a save. Default: None, as `step` returns all.
        """
        return None

    @abstractmethod
    def eval_step(self, batch: Batch | None) -> Evaluated:
        """Evaluate this rank's rows of `evaluation_micro_batches`, each whole, and nothing of padding: sums (M,) as
        `Recipe.measure` gives them, rows (R, K) as `Recipe.eval_outputs` does. Changes no state. May be collective."""

    def eval_rest(self) -> Evaluated | None:
        """What `eval_step` has begun and not yet returned. Default: None, as it returns all."""
        return None

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        """(step, sample ids) of rows that other processes read for finished steps. Each pair is returned once.

        Default: none, as this rank reads its rows itself.
        """
        return []

    def unread(self, split: str, epoch: int) -> int:
        """How many rows of an epoch other processes have failed to read so far. Default: 0."""
        return 0

    def told_to_stop(self) -> bool:
        """Whether a process that works for this rank got a signal to stop. Default: no such processes."""
        return False

    def end(self, reason: str = "finished") -> None:
        """The run has ended. Release the processes that work for this rank. `reason`: that of the clock's Stop.
        Default: nothing.
        """

    def swap_ema(self, on: bool) -> None:
        """Exchange the weights and their exponential moving averages (`step.ema`): `on=True` puts the averages in place
        of the weights, `on=False` puts the weights back. Called after `sync`. May be collective.

        ConfigError for strategies that keep no averages.
        """
        raise ConfigError(f"{type(self).__name__} cannot evaluate averaged weights; use step.ema=0")

    def sync(self) -> None:
        """Make this rank's state the run's state, before an evaluation or a save: running statistics are averaged over
        ranks. Collective.
        """

    def check_replicas(self) -> str | None:
        """ConfigError where replicas differ; else a warning for people. After `sync`, before a save. Collective."""

    @abstractmethod
    def state(self) -> State:
        """The boxes that this rank owns, under full parameter names, and scalars. Called after `sync`."""

    @abstractmethod
    def load(self, source: Source) -> None:
        """Take this rank's part from a checkpoint that was written under any strategy and any number of ranks."""

    def replicated(self) -> list[dict[str, Tensor]]:
        """Copies of the parameters here, by name, bitwise equal to those of this name elsewhere. Default: none."""
        return []

    def memory(self) -> Memory | None:
        """Bytes that this rank needs. Called after `warmup`, which measures activations. Default: unknown."""
        return None

    def watch_outputs(self) -> list[Any]:
        """Begin to sum up the outputs of modules, see `ModuleOutputs`. Default: nothing is watched."""
        return []

    @abstractmethod
    def skipped(self) -> int:
        """How many updates were skipped so far because loss or gradient was not finite. The same number on all ranks.
        May synchronise with the device.
        """


@dataclass(frozen=True)
class RoleContext:
    """What a process gets that helps the ranks which run the engine. See `Strategy.run_helper`."""

    place: Place
    facts: dict[str, Any]
    """What all processes of a run must have in common, as JSON. See `dtf.core.consistency`."""

    open: Callable[[str, Shard, int], Batches]
    """`open(split, shard, micro_batch_rows)`: a share of global batches of `train` or `eval`; see `Splits.loader`."""

    beat: Callable[[str, int], None]
    """`beat(phase, step)` marks that this process is alive."""

    stop_requested: Callable[[], bool]
    """Whether this process got a signal to stop."""

    say: Callable[[str], None] = lambda text: None
    """Show a line of text to the people who watch this process."""

    folder: Path = Path()
    """The run folder."""


@dataclass(frozen=True)
class ExternalProcess:
    """The one process of a run that this command starts, where a command of its own starts each of the others."""

    role: str
    rank: int  # among all processes of the run; 0 makes its folder, and reports
    towards: tuple[str, int]  # host and port of rank 0
    token: str = field(repr=False)  # the secret that processes of a run share


@dataclass(frozen=True)
class RendezvousContext:
    """Where a process of the role that runs the engine is in a run, and what it may do while it looks for the others.
    See `Strategy.rendezvous`.
    """

    place: Place
    folder: Path
    run_id: str
    facts: dict[str, Any]
    """What all processes must have in common and what is known this early, as JSON. See `RoleContext.facts`."""

    wait: Callable[[], None]
    """To be called regularly while waiting, as a sign of life. Raises Preempted when this process got a signal to stop.
    """

    say: Callable[[str], None]
    """Show a line of text to the people who watch this process."""


class Update(ABC):
    """What happens around forward and backward: where parameters come from, and where gradients go. Tensors are on the
    device of the parameters.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_names(Update, cls, {"use_averages": "swap_ema"})

    @abstractmethod
    def begin(self) -> None:
        """Called before the first forward pass of a step. Does nothing, or takes parameters that were pulled."""

    @abstractmethod
    def scale(self, factor: Tensor) -> Tensor:
        """The factor () with which the loss is differentiated: `factor` (), times the loss scale if there is one."""

    @abstractmethod
    def apply(self, step: int, lr: float) -> Tensor:
        """Clip, step and clear gradients, or push them. Called once after the backward passes of step `step` (counted
        from 0), with the learning rate `lr`. Collective where ranks share parameters.

        Returns the global L2 norm of the gradient before clipping and after unscaling, as (2,) [norm, 1], the same on
        all ranks; [0, 0] when an overflow hides it. A norm that is not finite changes no parameter: every rank skips
        and counts the step.
        """

    @abstractmethod
    def state(self) -> State:
        """What this rank contributes to a checkpoint."""

    @abstractmethod
    def load(self, source: Source) -> None:
        """Take this rank's part from a checkpoint."""

    @abstractmethod
    def swap_ema(self, on: bool) -> None:
        """As `Program.swap_ema`. Only where the optimizer keeps averages."""

    @abstractmethod
    def skipped(self) -> int:
        """How many updates were skipped so far. The same on all ranks. May synchronise with the device."""

    @abstractmethod
    def bytes(self) -> tuple[int, int, int, int]:
        """Bytes on this rank of the parameters, gradients, optimizer state and sparse tables."""

    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """The parameters on this rank: by name, and slices by name and offset. Parameters of one name are bitwise equal
        on all ranks.
        """


class Strategy(ABC):
    """A way to spread a task over ranks. Fields are the config node `strategy`. The module imports torch only inside
    `setup`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_names(Strategy, cls, {"alone": "external_process", "meet": "rendezvous", "assist": "run_helper"})

    @property
    def replaceable(self) -> frozenset[str]:
        """Roles whose processes hold no state. When one of them is lost, it alone is started again while the others go
        on; none of them outlives the others. Never the role that runs the engine. Default: none.
        """
        return frozenset()

    def roles(self, processes: int) -> dict[str, int]:
        """How many processes of which role to start for `launcher.processes`, in order of rank. Default: all are
        trainers.

        The role given first is the one that runs the engine. Processes of the others run `run_helper`.
        """
        return {"trainer": processes}

    def check_processes(self, given: int) -> None:
        """Raise ConfigError where options contradict `given`, the `launcher.processes` that the user set. Default: none
        do.
        """

    def computes_on_device(self, role: str) -> bool:
        """Whether each process of a role gets a GPU, where there are GPUs. Processes of other roles may share it. A
        process that gets none uses the CPU. Default: trainers get one.
        """
        return role == "trainer"

    def external_process(self) -> ExternalProcess | None:
        """The one process that this command is to start, where the others are started elsewhere by their own commands.
        ConfigError for options that do not say which. Default: None, the launcher starts all processes.
        """
        return None

    def hints(self, processes: int) -> list[str]:
        """Recommendations for other options, one a line. Default: none."""
        return []

    def rendezvous(self, context: RendezvousContext) -> RendezvousContext:
        """Find the other processes and return the rank that this process gets. Called first of all in processes of the
        role that runs the engine; returns when all are there. Default: the context as the launcher set it.
        """
        return context

    @abstractmethod
    def check(self, task: Task, processes: int, devices: str) -> None:
        """Raise ConfigError for what cannot run. `processes`: `launcher.processes`; `devices`: `cpu` or `cuda`.

        Pure and torch-free. Called before processes are started.
        """

    @abstractmethod
    def communication(self, devices: str) -> str | None:
        """The torch.distributed backend of the trainers on `cpu` or `cuda`. None when they never communicate through
        it.
        """

    @abstractmethod
    def setup(self, task: Task, world: World) -> Program:
        """Make the program of this rank. Collective over the processes of the role that runs the engine. May raise
        ConfigError.
        """

    def run_helper(self, task: Task, context: RoleContext) -> None:
        """Run a process of another role to the end of the run. PeerError when the processes that it helps are gone."""
        raise AssertionError(f"{type(self).__name__} has one role")


def check_divides(key: str, value: int, processes: int) -> None:
    """Raise ConfigError unless `value`, ranks in a group, divides `processes`. 0 stands for all ranks. `key`: the
    config key that gave it.
    """
    if value and processes % value:
        possible = [str(n) for n in range(1, processes + 1) if not processes % n]
        raise ConfigError(f"{key}={value} does not divide launcher.processes={processes}; use {' or '.join(possible)}")


def check_layout(strategy: str, recipe: Recipe, what: str) -> None:
    """Raise ConfigError for a recipe without a `layout()`. `what`: what the strategy needs to know from it."""
    if type(recipe).layout is Recipe.layout:
        raise ConfigError(
            f"strategy={strategy}: {type(recipe).__name__} has no layout() that says {what}; add one, or use "
            "strategy=fsdp, which divides any model"
        )


def check_tables(task: Task, placement: Placement, processes: int) -> None:
    """Raise ConfigError for sparse tables that cannot be sharded in this way over so many processes. Torch-free."""
    widths = task.recipe.table_widths()
    if processes == 1 or not widths:
        return
    if placement is Placement.table_wise and len(widths) == 1:
        raise ConfigError(
            f"strategy.tables=table_wise puts whole tables on ranks, and {type(task.recipe).__name__} has one; use "
            "strategy.tables=row_wise"
        )
    if placement is not Placement.column_wise:
        return
    for name, width in widths.items():
        if bounds(width, processes, processes - 1)[0] == width:  # nothing is left for the last
            raise ConfigError(
                f"strategy.tables=column_wise: table {name} has {width} columns, too few for {processes} ranks; use "
                "strategy.tables=row_wise"
            )
        states = (
            [state for state, (count, _) in task.rows.states(width).items() if count != width]
            if task.rows is not None
            else []
        )
        if states:
            raise ConfigError(
                f"strategy.tables=column_wise divides rows, and {type(task.rows).__name__} keeps {states[0]} of whole "
                "ones; use strategy.tables=row_wise"
            )
