"""job=train: check, make the run folder, start the ranks, and let observers see what they report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.errors import DtfError, Exit
from dtf.job import Job
from dtf.observer import Observers
from dtf.registry import register
from dtf.run import Run
from dtf.values import Ended, Event, Failed, Measured, Started

if TYPE_CHECKING:
    from pathlib import Path

    from dtf.config import Composed


@register("job", "train")
class TrainJob(Job):
    """Train the recipe."""

    def __post_init__(self) -> None:
        # What `run` leaves for a sweep's summary; no fields, which would be config keys.
        self.folder: Path | None = None
        self.best: tuple[str, float] | None = None  # the objective and its best value

    def run(self, composed: Composed) -> int:
        settings = composed.check()
        launcher = settings.launcher
        launcher.check(settings.strategy)
        processes, devices = launcher.count(), launcher.devices_kind()
        run = launcher.open(composed.config, lambda folder: Run.open(composed.config, settings, processes, devices, folder), composed.command)
        self.folder = run.folder
        objective = settings.run.objective or settings.recipe.objective[0]
        observers = Observers(settings.observer if run.leader else {})
        exit, cause = Exit.BUG, "an exception in the launching process"

        def see(event: Event) -> None:
            nonlocal cause
            if isinstance(event, Started):
                run.ready(event.table)
            if isinstance(event, Failed | Ended):
                cause = event.message if isinstance(event, Failed) else event.reason
            if isinstance(event, Measured) and event.best:
                self.best = (objective, event.values[objective])
            elif isinstance(event, Ended) and f"best_{objective}" in event.values:  # also one from before a resume
                self.best = (objective, event.values[f"best_{objective}"])
            observers.see(event)

        try:
            observers.open(run.folder, run.redacted())
            exit = Exit(launcher.launch(run, see))
        except DtfError as error:
            exit, cause = error.exit, str(error)
            raise
        finally:
            run.end(exit, cause)
            observers.close()
        return exit
