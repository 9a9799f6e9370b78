"""The contract of launchers: how the processes of a run are started."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dtf.api.schema import KeyProblem, show
from dtf.core.errors import ConfigError, Exit, error_line, io_failure
from dtf.core.types import Failed

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy
    from dtf.core.types import Event


LONGEST_S = 1_000_000
"""The most seconds that any option may set for a wait: 11 days. poll(2) accepts at most twice as long."""
WORK = "dtf.engine.train:work"
"""What a rank runs unless a job says otherwise: a function as `module:function`, see `rank_process.Entry`."""


class LaunchedRun(Protocol):
    """What a launcher needs to know of a run."""

    folder: Path
    id: str
    config: dict[str, Any]  # resolved
    token: str  # a secret that its processes share

    @property
    def strategy(self) -> Strategy:
        """The strategy of the run."""
        ...


AnyRun = TypeVar("AnyRun", bound=LaunchedRun)


class Launcher(ABC):
    """Starts the processes of a run. Fields are the config node `launcher`. Torch-free, but for `inline` and `env`,
    which become ranks themselves.
    """

    starts_ranks = True
    """Whether this launcher starts new ranks for each run of this process. False where ranks exist already and end with
    their one run.
    """

    hears_all = True
    """Whether the process that launches hears all events of the run, which `dtf.train` returns."""

    in_this_process = False
    """Whether the process that launches becomes a rank itself, so that ranks have what it has imported and defined."""

    @abstractmethod
    def devices_kind(self) -> str:
        """`cuda` or `cpu`: what the ranks will run on. Torch-free (it reads CUDA_VISIBLE_DEVICES and asks NVML).

        ConfigError when the config asks for devices that are not there.
        """

    @abstractmethod
    def count(self) -> int:
        """The number of processes: `launcher.processes`, where `auto` is one per GPU, or 2 without GPUs. Torch-free."""

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError when this launcher cannot start the processes that the strategy needs.

        Torch-free. Called before the run folder is made.
        """

    def meeting_point(self) -> tuple[str, int, bool] | None:
        """Host and port where this process meets those of other hosts, and whether this process listens there.

        Default: None, there is no such address.
        """
        return None

    def open(self, config: dict[str, Any], make: Callable[[str], AnyRun], command: Sequence[str] = ()) -> AnyRun:
        """Make the run that this process takes part in. Default: `make("")`. Where ranks exist already, one process
        makes it for all.

        `make(folder)` goes on in the folder of an earlier attempt of the same run; with "" the config decides.
        `command`: the arguments of the command line that composed this config, for launchers that start the same
        command elsewhere.
        """
        return make("")

    @abstractmethod
    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        """Run ranks of the function `entry` to their end, and restart them as configured. Pass every event of the run
        to `see`. Returns an exit code.

        A failure of ranks is also printed, see `report`. A failure of the launcher itself is raised as a DtfError.
        """


def check_one_role(launcher: str, strategy: Strategy, processes: int) -> None:
    """Raise ConfigError for a strategy of several roles. For launchers that start ranks of one role."""
    roles = strategy.roles(processes)
    if len(roles) > 1:
        parts = " and ".join(f"{number} {role}{'s' * (number != 1)}" for role, number in roles.items())
        raise ConfigError(
            f"launcher={launcher} starts ranks of one role, and this strategy needs {parts}; use launcher=local"
        )


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_environment(env: dict[str, str]) -> None:
    """Raise ConfigError unless `launcher.env` holds names and values of environment variables that ranks heed."""
    for name, value in env.items():
        if not name or "=" in name:
            raise KeyProblem(
                "launcher.env", f"launcher.env.{show(name)}={show(value)} must be a name without '=', and its value"
            )
        if name in _THREADS:
            raise KeyProblem(
                "launcher.env",
                f"launcher.env.{name}={show(value)}: the launcher sets the threads of each rank itself; use "
                "launcher.threads",
            )


def log_folder(log_dir: str, run_folder: Path) -> Path:
    """The folder for the logs of a run's ranks: the run folder, or a folder of the same name in `launcher.log_dir`,
    which is made here.

    ConfigError when it cannot be made.
    """
    if not log_dir:
        return run_folder
    folder = Path(log_dir, run_folder.name).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        refused = ConfigError(f"launcher.log_dir={log_dir}: {folder} cannot be made: {error.strerror}")
        raise io_failure(error) or refused from error
    return folder


def author_traceback(failure: Failed) -> str:
    """The traceback of an error that a recipe's author made, for people who have no log. Empty for others."""
    first, chained, _ = failure.traceback.partition("\nThe above exception was the direct cause")
    return first.rstrip() if chained and failure.by_author else ""


Hear = Callable[[Failed, BaseException | None], bool]
"""Takes a failure of a run, and what was raised where that was in this process. Returns whether people hear of it in
another way than by `report`.
"""

_hear: ContextVar[Hear] = ContextVar("hear", default=lambda failure, raised: False)


@contextmanager
def failures_told(hear: Hear) -> Iterator[None]:
    """A context in which `report` asks `hear` first, and prints nothing of what that takes upon itself."""
    token = _hear.set(hear)
    try:
        yield
    finally:
        _hear.reset(token)


def report(failure: Failed, raised: BaseException | None = None) -> None:
    """Print the failure of a rank on standard error as one line, after its traceback unless the message says all there
    is to know.

    `raised`: the exception, where the rank is this process and has no log: then the traceback of an error by a
    recipe's author is printed too.
    """
    if _hear.get()(failure, raised):
        return
    if raised is not None and (text := author_traceback(failure)):
        print(text, file=sys.stderr)
    if failure.traceback and failure.exit in (Exit.BUG, Exit.PEER, Exit.NO_PROGRESS):
        print(failure.traceback.rstrip(), file=sys.stderr)
    print(error_line(Exit(failure.exit), failure.message, failure.rank, failure.step), file=sys.stderr, flush=True)
