"""`job=logs`: what the ranks of a run printed, or what its job printed where a scheduler runs it. Changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.cluster import record
from dtf.cluster.platform import State
from dtf.core.errors import ConfigError, DataError, Exit, PeerError
from dtf.core.files import open_regular
from dtf.core.text import harmless
from dtf.runs.sweep_record import is_sweep

if TYPE_CHECKING:
    from dtf.config.compose import Composed


@register("job", "logs")
class Logs(Job):
    """Print what a run has printed."""

    run_folder: str = option(doc="the folder of the run")
    follow: bool = option(default=False, doc="go on until the job ends; for runs that a scheduler has")

    def run(self, composed: Composed) -> int:
        folder = Path(self.run_folder)
        if not folder.is_dir():
            raise DataError(f"job.run_folder={folder} does not exist; give the folder of a run")
        known = record.find(folder)
        if known is None and self.follow:
            raise ConfigError(
                f"job.follow=true follows the job of a scheduler, and {folder} was not submitted to one; use tail -F "
                f"{folder}/rank_*.log"
            )
        if known and self.follow:
            _tell_queued(known)
        printed = False
        for line in known.platform.logs(known.handle, folder, self.follow) if known else _of_ranks(folder):
            print(harmless(line), flush=self.follow)
            printed = True
        if known and not printed and not self.follow:
            _tell_queued(known)
        return Exit.OK


def _tell_queued(known: record.JobRecord) -> None:
    """Say why nothing is printed yet, where the job has not begun."""
    with suppress(PeerError, ConfigError):
        job = known.platform.state(known.handle)
        if job.state is State.queued:
            detail = f" ({job.detail})" if job.detail else ""
            print(harmless(f"dtf: {known.title} is queued{detail}: it has printed nothing yet"), file=sys.stderr)


def _of_ranks(folder: Path) -> Iterator[str]:
    """The logs that ranks write into the run folder, one after the other. DataError where there is none."""
    paths = sorted(folder.glob("rank_*.log"), key=lambda path: (len(path.name), path.name))
    if not paths and is_sweep(folder):
        trials = sorted(path.parent for path in folder.glob("*/run.json"))
        such = f", such as job.run_folder={trials[0]}" if trials else ", once one has begun"
        raise DataError(f"job.run_folder={folder} is a sweep whose trials have logs of their own; give one{such}")
    if not paths:
        raise DataError(f"{folder} has no log of a rank; launcher.log_dir may have put them elsewhere")
    for path in paths:
        try:
            with open_regular(path) as file:
                text = file.read().decode(errors="replace").rstrip("\n")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        if text:
            yield f"== {path.name}"
            yield from text.split("\n")
