"""What a strategy adds whose processes have several roles, such as servers and trainers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.task import Task
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtf.core.types import Batches, Place, Shard


@dataclass(frozen=True)
class RoleContext:
    """What a process gets that helps the ranks which run the engine. See `HelperRoles.run`."""

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
    """The run folder; of a process that a command of its own started, a folder for its log."""

    run_dir: str = ""
    """`run.dir`, where it was given."""


@dataclass(frozen=True)
class RendezvousContext:
    """Where a process of the role that runs the engine is in a run, and what it may do while it looks for the others.
    See `HelperRoles.rendezvous`.
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

    stop_requested: Callable[[], bool] = lambda: False
    """Whether this process got a signal to stop."""


class HelperRoles:
    """The roles of a strategy that do not run the engine: the optional part of `Strategy`, see `Strategy.helper_roles`.

    The role that `Strategy.roles` gives first runs the engine; processes of the others help it. This class is the part
    of strategies with one role.
    """

    @property
    def replaceable(self) -> frozenset[str]:
        """Roles whose processes hold no state. When one of them is lost, it alone is started again while the others go
        on; none of them outlives the others. Never the role that runs the engine. Default: none.
        """
        return frozenset()

    def on_device(self, role: str) -> bool:
        """Whether each process of a role gets a GPU, where there are GPUs. Processes of other roles may share it. A
        process that gets none uses the CPU. Default: trainers get one.
        """
        return role == "trainer"

    def count_key(self, role: str) -> str:
        """The config key that says how many processes of a role there are, for error messages. Default:
        launcher.processes for trainers, and for another role a key of the strategy with its name and an s.
        """
        return "launcher.processes" if role == "trainer" else f"strategy.{role}s"

    def check_manual_start(self) -> None:
        """Raise ConfigError where a process cannot be started by a command of its own (`launcher=manual`), which gives
        it `Place.manual` to find the others. Default: none can.
        """
        raise ConfigError(
            "launcher=manual: processes of this strategy find each other by their launcher alone; use launcher=local"
        )

    def rendezvous(self, context: RendezvousContext) -> RendezvousContext:
        """Find the other processes and return the rank that this process gets. Called first of all in processes of the
        role that runs the engine; returns when all are there. Default: the context as the launcher set it.
        """
        return context

    def run(self, task: Task, context: RoleContext) -> None:
        """Run a process of a helper role to the end of the run. PeerError when the processes that it helps are gone."""
        raise AssertionError(f"{type(self).__name__} has no process of role {context.place.role}")
