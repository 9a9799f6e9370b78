"""The contracts of a strategy: how it spreads a task over ranks (Strategy), and what it makes of it (Program).
Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dtf.api.helper_roles import HelperRoles
from dtf.api.leased_work import LeasedWork
from dtf.api.recipe import Recipe
from dtf.api.registry import name_of
from dtf.api.schema import KeyProblem
from dtf.api.sparse_table import KeepsChanges, Placement, Placements, placement_of
from dtf.api.task import Source, Task
from dtf.core.errors import ConfigError
from dtf.core.renamed import accept_old_names
from dtf.core.types import Batch, Evaluated, Shard, State, StepOutput, Train
from dtf.distributed.sharding import bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from dtf.api.guard import Guard
    from dtf.api.options import Compile
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.core.types import Memory
    from dtf.distributed.world import World


class Program(ABC):
    """A task on a world of ranks. It steps, evaluates, saves and loads.

    The engine drives a program and never asks which strategy made it. A step is one whole optimizer step.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_names(Program, cls, {"rehearse": "warmup", "settle": "sync", "use_averages": "swap_ema"})

    shard: Shard | None
    """The part of each global batch that this rank reads, and no other rank. None: it reads nothing, and gets None for
    a batch.
    """

    shares: int
    """Into how many shares a global batch is divided. A share belongs to a rank, to a replica within a rank, or to a
    group of ranks that form one replica.
    """

    micro_batch_rows: int
    """Rows of each micro-batch that a global batch is cut into. See `StepOptions.rows_each`."""

    leased: LeasedWork = LeasedWork()
    """What other processes compute for this rank. Default: nothing, as `step` and `eval_step` return all."""

    row_flops: float | None = None
    """Floating-point operations that the whole model makes for a row of training in matrix products and convolutions,
    forward and backward, without what is computed again. `warmup` counts them. None: not known, or not yet.
    """

    devices: Sequence[torch.device] = ()
    """The devices that this process computes on. Empty: the one of its place."""

    follows_memory_format = False
    """Whether passes compute images in the memory format of the task, see `Task.channels_last`. `Spmd` does."""

    tables: KeepsChanges | None = None
    """The sparse tables whose rows `state` holds. None: there are none, or it always holds all rows."""

    plugin = ""
    """The strategy that made it, where that is none of dtf's own; for messages."""

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

    @property
    def reads_ahead(self) -> bool:
        """Whether `expect` is of use."""
        return False

    def expect(self, batch: Batch | None) -> None:
        """The next `step` comes before one with this prepared batch, whose rows of sparse tables may be read meanwhile.
        May be collective.

        Default: nothing.
        """
        return

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

    @abstractmethod
    def eval_step(self, batch: Batch | None) -> Evaluated:
        """Evaluate this rank's rows of `evaluation_micro_batches`, each whole, and nothing of padding: sums (M,) as
        `Recipe.measure` gives them, rows (R, K) as `Recipe.eval_outputs` does. Changes no state. May be collective."""

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
        """ConfigError where replicas differ; else a warning for people. Collective.

        After `state`, whose tensors a GPU may still copy: only later work of that GPU may change them. Nothing is
        written before it returns.
        """

    @abstractmethod
    def state(self) -> State:
        """The boxes that this rank owns, under full parameter names, and scalars. Called after `sync`. See
        `State.private` for programs whose ranks cannot change each other's boxes.
        """

    @abstractmethod
    def load(self, source: Source) -> None:
        """Take this rank's part from a checkpoint that was written under any strategy and any number of ranks."""

    def replicated(self) -> list[dict[str, Tensor]]:
        """Copies of the parameters here, by name, bitwise equal to those of this name elsewhere. Default: none."""
        return []

    def guard(self) -> Guard | None:
        """What compares the replicas, see `train.guard_every`. Called after `warmup`. Collective. None: nothing can."""
        return None

    def memory(self) -> Memory | None:
        """Bytes that this rank needs. Called after `warmup`, which measures activations. Default: unknown."""
        return None

    def watch_outputs(self) -> list[Any]:
        """Begin to sum up the outputs of modules, see `ModuleOutputs`. Default: nothing is watched."""
        return []

    def counts(self) -> dict[str, int]:
        """What happened on this rank since the last call, for the next report of training: additive over ranks, with
        the same names on all. Called after `LeasedWork.rest`. Default: nothing.
        """
        return {}

    @abstractmethod
    def skipped(self) -> int:
        """How many updates were skipped so far because loss or gradient was not finite. The same number on all ranks.
        May synchronise with the device.
        """

    def first_skipped(self) -> tuple[int, list[str]] | None:
        """The first step of this process whose update was skipped, and the parameters here whose gradient was not
        finite. Asked only where the run ends for it. Default: not known. None on all ranks or on none.
        """
        return None


class Strategy(ABC):
    """A way to spread a task over ranks. Fields are the config node `strategy`. The module imports torch only inside
    `setup`.
    """

    helper_roles: HelperRoles = HelperRoles()
    """What strategies with several roles say of the others. Default: there is one role."""

    uses_blocks = False
    """Whether it divides a model by its blocks: those of the layout, or found ones, which the start-up table shows."""

    def roles(self, processes: int) -> dict[str, int]:
        """How many processes of which role to start for `launcher.processes`, in order of rank. Default: all are
        trainers.

        The role given first is the one that runs the engine. For the others see `helper_roles`.
        """
        return {"trainer": processes}

    def from_host(self, launcher: Mapping[str, Any], is_set: Callable[[str], bool]) -> dict[str, Any]:
        """Keys of the config, such as `launcher.processes`, whose values follow from this host, and these.

        Called once, by the process that composes the config; a run that goes on keeps what was chosen at its start.
        `launcher`: the config node. `is_set`: whether a file or the command line sets a key. Torch-free. Default: none.
        """
        return {}

    @abstractmethod
    def check(self, task: Task, processes: int, devices: str) -> None:
        """Raise ConfigError for what cannot run. `processes`: `launcher.processes`; `devices`: `cpu` or `cuda`.

        Pure and torch-free. Called before processes are started.
        """

    def unguarded(self, processes: int) -> str:
        """Why `train.guard_every` cannot compare replicas with so many processes, and what to use. Empty: it can. Pure
        and torch-free.

        Default: it can where there are several processes.
        """
        return "" if processes > 1 else "one process has no second copy; use launcher.processes=2 or more"

    def uncompiled(self, kind: Compile, processes: int) -> str:
        """Why `step.compile` cannot be of this kind with so many processes, and what to use. Empty: it can. Pure and
        torch-free.

        A strategy whose program computes with `dtf.replica.Replica` returns an empty text. Default: it cannot.
        """
        return (
            f"nothing says that the program of {type(self).__name__} compiles; let its `uncompiled` return '' if it "
            "computes with Replica, or use step.compile=off"
        )

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


def check_roles(strategy: Strategy, processes: int) -> None:
    """Raise ConfigError for a strategy whose `roles` or `helper_roles` name no processes that can be started."""
    who, roles = f"{type(strategy).__module__}.{type(strategy).__qualname__}", strategy.roles(processes)
    counts = roles.values() if isinstance(roles, dict) else ()
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise ConfigError(
            f"{who}.roles({processes}) returned {roles!r}; it must return a dict of role -> number of processes, such "
            f"as {{'trainer': {processes}}}"
        )
    helpers = strategy.helper_roles
    if not isinstance(helpers, HelperRoles):
        raise ConfigError(f"{who}.helper_roles is {helpers!r}; it must be a dtf.HelperRoles, or be left out")
    engine_role, *others = roles
    wrong = next((role for role in helpers.replaceable if role not in others), None)
    if wrong is not None:
        which = f"the role that runs the engine ({engine_role})" if wrong == engine_role else f"{wrong!r}"
        raise ConfigError(
            f"{who}.helper_roles.replaceable has {which}; it may have {', '.join(others) or 'no role'}: lost processes "
            "of these are started again alone"
        )


def check_guard(strategy: Strategy, recipe: Recipe, every: int, processes: int) -> None:
    """Raise KeyProblem where `train.guard_every` has no replicas to compare."""
    why = strategy.unguarded(processes) if every else ""
    if every and not why and recipe.table_widths():
        why = f"{type(recipe).__name__} has sparse tables, whose rows are not compared"
    if why:
        raise KeyProblem(
            "train.guard_every",
            f"train.guard_every={every} can compare nothing under strategy={name_of('strategy', strategy)}: {why}; or "
            "use train.guard_every=0",
        )


def check_divides(key: str, value: int, processes: int) -> None:
    """Raise ConfigError unless `value`, ranks in a group, divides `processes`. 0 stands for all ranks. `key`: the
    config key that gave it.
    """
    if value and processes % value:
        possible = [str(n) for n in range(1, processes + 1) if not processes % n]
        raise ConfigError(f"{key}={value} does not divide launcher.processes={processes}; use {' or '.join(possible)}")


def check_layout(strategy: str, recipe: Recipe, what: str) -> None:
    """Raise ConfigError for a recipe without a `layout()`. `what`: what the strategy needs to know from it, which is
    not found by looking at the model.
    """
    if type(recipe).layout is Recipe.layout:
        raise ConfigError(
            f"strategy={strategy}: {type(recipe).__name__} has no layout() that says {what}; add one, or use "
            "strategy=fsdp, which divides any model"
        )


def check_tables(task: Task, placements: Placements, processes: int) -> None:
    """Raise ConfigError for sparse tables that cannot be sharded in this way over so many processes. Torch-free."""
    widths = task.recipe.table_widths()
    if isinstance(placements, dict) and placements.keys() != widths.keys():
        wrong = next((name for name in placements if name not in widths), "")
        why = f"there is no table {wrong}" if wrong else f"{next(n for n in widths if n not in placements)} is left out"
        known = ", ".join(widths) or "it has none"
        raise ConfigError(f"strategy.tables: {why}; name each table of {type(task.recipe).__name__}: {known}")
    if processes == 1 or not widths:
        return
    for name, width in widths.items():
        placement = placement_of(placements, name)
        if placement is Placement.table_wise and len(widths) == 1:
            raise ConfigError(
                f"strategy.tables=table_wise puts whole tables on ranks, and {type(task.recipe).__name__} has one; use "
                "strategy.tables=row_wise"
            )
        if placement is Placement.column_wise and (why := column_objection(name, width, processes, task.rows)):
            raise ConfigError(f"{why}; use strategy.tables=row_wise")


def column_objection(name: str, width: int, processes: int, rule: RowOptimizer | None) -> str:
    """Why the columns of a table of this width cannot be divided over so many processes; empty: they can."""
    if rule is not None and rule.disk:
        return f"strategy.tables=column_wise divides rows, and sparse.disk={rule.disk} keeps whole ones"
    if bounds(width, processes, processes - 1)[0] == width:  # nothing is left for the last
        return f"strategy.tables=column_wise: table {name} has {width} columns, too few for {processes} ranks"
    states = [] if rule is None else [state for state, (count, _) in rule.states(width).items() if count != width]
    if not states:
        return ""
    return f"strategy.tables=column_wise divides rows, and {type(rule).__name__} keeps {states[0]} of whole ones"
