"""What `python -m dtf job=...` does. Jobs run in the launching process, without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtf.config.compose import Composed


class Job(ABC):
    """Fields are the config node `job`."""

    trains = False
    """Whether it needs the length of a run."""

    uses_model = False
    """Whether it has a key `model` that may name a run, whose config then stands behind the command line; see
    `dtf.config.inherit`.
    """

    @abstractmethod
    def run(self, composed: Composed) -> int:
        """Do it; return the exit code. DtfErrors are printed and turned into exit codes by the caller."""
