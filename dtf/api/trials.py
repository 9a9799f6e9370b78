"""The contract between a sweep and what runs its trials: processes on this host, or jobs of a scheduler. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from dtf.api.job import ComposedConfig


@dataclass(frozen=True)
class TrialOrder:
    """A trial, or the part of one up to a rung, that is to be run.

    `composed.config` is what runs, with all that the sweep has decided in it (`train.until`, `checkpoint.mirror`).
    `composed.command` composes all else in another process.
    """

    number: int  # of the trial, from 1
    title: str  # what sets it apart, for people
    composed: ComposedConfig
    folder: Path | None  # its run folder; None: of a job that keeps none


class TrialEnd(NamedTuple):
    """A trial has ended, or come to the step at which it was to stop."""

    number: int
    code: int  # exit code
    best: tuple[str, float] | None = None  # the objective and its best value, where that is known


class TrialExecutor(Protocol):
    """Runs trials. What one has come to is read from its run folder, which this process must see."""

    places: int
    """How many trials it runs at once."""

    def start(self, order: TrialOrder) -> None:
        """Begin a trial. Fewer than `places` run."""
        ...

    def wait(self) -> TrialEnd:
        """Wait until one of the trials that were started has ended. A signal to stop is passed on to all of them."""
        ...

    def stop(self) -> None:
        """Ask all trials that run to save and end, with exit code 75. Returns at once; `wait` tells of their ends."""
        ...

    def close(self) -> None:
        """End whatever still runs."""
        ...
