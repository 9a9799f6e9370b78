"""`job=train`: checks the settings, makes the run folder, starts the ranks, and passes their reports to observers."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.observer import Observers
from dtf.api.registry import register
from dtf.api.row_storage import rows_removed
from dtf.cluster.submit import refuse_submitted
from dtf.core.errors import BudgetError, ConfigError, DtfError, Exit, io_failure
from dtf.core.types import Ended, Event, Failed, Measured, Note
from dtf.host.deadline import deadline
from dtf.host.signals import Stop
from dtf.runs.budget import BudgetMeter, forget_damage, key, limit_s, spent_s
from dtf.runs.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dtf.api.options import BudgetOptions
    from dtf.config.compose import Composed


@register("job", "train")
class TrainJob(Job):
    """Train the recipe."""

    trains = True
    submits = True

    def __post_init__(self) -> None:
        # Set by a sweep or a relay before `run`, or read after it. They are no fields, which would be config keys.
        self.folder: Path | None = None
        self.elsewhere_s: Callable[[], float] = lambda: 0.0
        self.best: tuple[str, float] | None = None
        self.watch: Callable[[Event], None] = lambda event: None

    def run(self, composed: Composed) -> int:
        if composed.settings.train.dry_run:
            if self.folder is not None:
                raise ConfigError("train.dry_run tries one run, which is kept nowhere; leave -m out")
            from dtf.jobs.dry_run import dry_run

            return dry_run(composed)
        return self.train(composed)

    def _begin_counting(self, run: Run, budget: BudgetOptions) -> None:
        """BudgetError where nothing is left of the budget. DataError where that cannot be told."""
        if limit_s(budget) == math.inf:
            run.notes += [note] if (note := forget_damage(run.folder)) else []
        elif self.elsewhere_s() + spent_s(run.folder) >= limit_s(budget):
            raise BudgetError(f"{key(budget)} was spent before; raise it to go on")

    def train(self, composed: Composed) -> int:
        """Train to the end of the plan. Returns the exit code."""
        with ExitStack() as listening:
            return self._train(composed, listening, deadline(os.environ))

    def _make_run(self, composed: Composed, folder: str, until: float) -> Run:
        settings, launcher = composed.settings, composed.settings.launcher
        processes, devices = launcher.count(), launcher.devices_kind()
        again = folder or str(self.folder or "")
        run = Run.open(composed.config, settings, processes, devices, again, refuse_submitted)
        try:
            run.allot(until - time.time())
            self._begin_counting(run, settings.budget)
        except DtfError as error:
            run.end(error.exit, str(error), {"error": type(error).__name__})
            raise
        return run

    def _train(self, composed: Composed, listening: ExitStack, until: float) -> int:
        """`listening`: is told to count signals to stop once there is a folder, which must say how the run ended.
        `until`: see `deadline`.
        """
        settings = composed.check()
        launcher = settings.launcher
        launcher.check(settings.strategy)

        def make(folder: str) -> Run:
            listening.enter_context(Stop())
            return self._make_run(composed, folder, until)

        run = launcher.open(composed.config, make, composed.command)
        if not launcher.starts_ranks:
            listening.enter_context(Stop())
        self.folder = run.folder
        objective = settings.objective[0]
        observers = Observers(settings.observer if run.leader else {})
        exit, cause, raised = Exit.BUG, "an exception in the launching process", ""
        lock = threading.Lock()  # the meter warns from a thread of its own

        def see(event: Event) -> None:
            nonlocal cause, raised
            run.see(event)
            if isinstance(event, Failed | Ended):
                cause, raised = (event.message, event.error) if isinstance(event, Failed) else (event.reason, "")
            if isinstance(event, Measured) and event.best:
                self.best = (objective, event.values[objective])
            elif isinstance(event, Ended) and f"best_{objective}" in event.values:  # also one from before a resume
                self.best = (objective, event.values[f"best_{objective}"])
            with lock:
                observers.see(event)
            self.watch(event)

        meter = (
            BudgetMeter(run.folder, settings.budget, self.elsewhere_s, lambda text: see(Note("warning", text)))
            if run.leader
            else None
        )
        try:
            observers.open(run.folder, run.redacted())
            for text in run.notes:
                see(Note("warning", text))
            with meter or nullcontext(), rows_removed(run.config):
                exit = Exit(launcher.launch(run, see))
        except (DtfError, OSError) as error:
            failure = io_failure(error, run.folder) or error
            if isinstance(failure, DtfError):
                exit, cause, raised = failure.exit, str(failure), type(failure).__name__
            raise failure from failure.__cause__
        finally:
            run.end(exit, cause, meter and {"error": raised, "best": self.best, "seconds": round(meter.seconds, 1)})
            observers.close()
        return exit
