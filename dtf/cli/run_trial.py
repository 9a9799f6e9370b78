"""Runs one trial in this process, which is that of the sweep or one of its slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from dtf.api.trials import TrialEnd, TrialOrder
from dtf.cli.trials import seconds
from dtf.cluster.submit import is_submitted, submit
from dtf.config.compose import Composed
from dtf.core.errors import DataError
from dtf.runs.budget import limit_s

Reported = Callable[[Callable[[], int]], int]
"""Calls a function, reports what it raises, and returns an exit code."""


@runtime_checkable
class JobWithFolder(Protocol):
    """A job whose run is kept in a folder; other jobs have an exit code only."""

    folder: Path | None  # of the run; set before `run`
    elsewhere_s: Callable[[], float]  # seconds of its budget that other runs have spent by now; set before `run`
    best: tuple[str, float] | None  # the objective and its best value


class HereExecutor:
    """Runs trials in this process, one at a time."""

    places = 1

    def __init__(self, reported: Reported) -> None:
        self._reported, self._end = reported, TrialEnd(0, 0)

    def start(self, order: TrialOrder) -> None:
        assert isinstance(order.composed, Composed)
        code, best = run_trial(order.composed, order.folder, self._reported)
        self._end = TrialEnd(order.number, code, best)

    def wait(self) -> TrialEnd:
        return self._end

    def stop(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def run_trial(composed: Composed, folder: Path | None, reported: Reported) -> tuple[int, tuple[str, float] | None]:
    """Run a trial to its end. Returns its exit code, and its objective with the best value."""
    best: list[tuple[str, float]] = []

    def run() -> int:
        job = composed.job
        if folder is None or not isinstance(job, JobWithFolder):
            return submit(composed) if is_submitted(composed) else job.run(composed)
        job.folder, job.elsewhere_s = folder, _Elsewhere(folder, limit_s(composed.settings.budget) < math.inf)
        try:
            return job.run(composed)
        finally:
            best.extend([job.best] if job.best else [])

    code = reported(run)
    return code, best[0] if best else None


class _Elsewhere:
    """Seconds that the other trials of the sweep have taken by now; 0 where there is no limit. DataError where that
    cannot be told at the start.
    """

    def __init__(self, folder: Path, limited: bool) -> None:
        self._folder, self._limited = folder, limited
        self._seconds = seconds(folder.parent, folder, needed=True) if limited else 0.0

    def __call__(self) -> float:
        if self._limited:
            with suppress(DataError, OSError):
                self._seconds = max(self._seconds, seconds(self._folder.parent, self._folder, needed=True))
        return self._seconds
