"""What `python -m dtf job=...` does. Jobs run in the launching process, without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol


class ComposedConfig(Protocol):
    """What a job gets: the config of its command, composed and resolved. See `dtf.config.compose.Composed`."""

    @property
    def config(self) -> dict[str, Any]:
        """Plain values by group and key."""
        ...

    @property
    def settings(self) -> Any:
        """Objects of the registered classes. ConfigError when a mandatory key is missing."""
        ...

    @property
    def command(self) -> list[str]:
        """Arguments that compose the same config in another process."""
        ...

    @property
    def composer(self) -> Any:
        """What composed it; it knows all options."""
        ...

    def check(self, data: bool = True) -> Any:
        """The settings, once every part has agreed to them. ConfigError or DataError."""
        ...

    def chosen(self) -> dict[str, Any]:
        """Group -> what was chosen in it."""
        ...


class Job(ABC):
    """Fields are the config node `job`."""

    trains = False
    """Whether it needs the length of a run."""

    uses_model = False
    """Whether it has a key `model` that may name a run, whose config then stands behind the command line; see
    `dtf.config.inherit`.
    """

    @abstractmethod
    def run(self, composed: ComposedConfig) -> int:
        """Do it; return the exit code. DtfErrors are printed and turned into exit codes by the caller."""
