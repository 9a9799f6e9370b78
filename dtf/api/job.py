"""The contract of jobs: what `python -m dtf job=...` does. Jobs run in the launching process, without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

from dtf.core.types import Event


class ComposedConfig(Protocol):
    """What a job gets: the composed and resolved config of its command. See `dtf.config.compose.Composed`."""

    @property
    def config(self) -> dict[str, Any]:
        """Plain values by group and key."""
        ...

    @property
    def settings(self) -> Any:
        """Objects of the registered classes. ConfigError when a mandatory key has no value."""
        ...

    @property
    def command(self) -> list[str]:
        """Arguments that compose the same config in another process."""
        ...

    @property
    def composer(self) -> Any:
        """The composer that made this config. It knows all options."""
        ...

    def check(self, data: bool = True) -> Any:
        """The settings, after every part has checked its own. ConfigError or DataError."""
        ...

    def chosen(self) -> dict[str, Any]:
        """Group -> the option chosen in it."""
        ...


class Output(Enum):
    """What a job prints: text for people, or JSON for programs."""

    text = "text"
    json = "json"


class Job(ABC):
    """A job of the command line. Fields are the config node `job`."""

    trains = False
    """Whether the job needs `train.steps` or `train.epochs`."""

    submits = False
    """Whether a scheduler may run the job: with such a launcher it is submitted, see `dtf.cluster`. Other jobs do their
    work where they are started.
    """

    uses_model = False
    """Whether the job has a key `model` that may name a run. The config of that run then stands behind the command
    line, see `dtf.config.inherit`.
    """

    keys_of_run: ClassVar[tuple[str, ...]] = ("seed", "recipe", "precision", "step", "sparse.values")
    """Keys of that config which stand so: what describes the model and its data. The job itself decides how to spread
    the work.
    """

    @abstractmethod
    def run(self, composed: ComposedConfig) -> int:
        """Do the job and return an exit code. The caller prints DtfErrors and turns them into exit codes."""


@runtime_checkable
class Watchable(Protocol):
    """A job whose run can be watched."""

    watch: Callable[[Event], None]  # hears every event; set before `run`
