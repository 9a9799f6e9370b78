"""`job=cancel`: ends the run of a folder with notice, so that it saves: by its scheduler, or on this host."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.cluster import record
from dtf.cluster.platform import JobState, State
from dtf.core.errors import ConfigError, DataError, DtfError, Exit, PeerError
from dtf.core.files import small_text
from dtf.core.run_record import LOCK, is_locked
from dtf.core.text import plain_text
from dtf.runs.standing import standing
from dtf.runs.sweep_record import is_sweep

if TYPE_CHECKING:
    from dtf.config.compose import Composed


@register("job", "cancel")
class Cancel(Job):
    """End a run: it saves and can go on later."""

    run_folder: str = option(doc="the folder of the run, or of the sweep")
    forget: bool = option(
        default=False, doc="ask no scheduler, and set the record of its job aside: for one that is gone for good, as a "
        "cluster that was taken down. A new job may be submitted then"
    )  # fmt: skip

    def run(self, composed: Composed) -> int:
        folder = Path(self.run_folder)
        if not folder.is_dir():
            raise DataError(f"job.run_folder={folder} does not exist; give the folder of a run")
        if self.forget:
            return _forget(folder, record.find(folder))
        if _cancel_job(folder):
            return Exit.OK
        if is_sweep(folder):
            return _cancel_sweep(folder)
        found = standing(folder)
        if found is None or not found.live:
            print(f"dtf: nothing to end: no run lives in {folder}")
            return Exit.OK
        return _signal_holder(folder)


def _cancel_job(folder: Path) -> bool:
    """Cancel the job of a run or of a sweep, where one waits or runs, or may. Returns whether that is all there is to
    end. PeerError when its scheduler does not answer.
    """
    known = record.find(folder)
    job = known and _state(known)
    if known is None or job is None or not (job.state.is_live or job.state is State.unknown):
        return False
    known.platform.cancel(known.handle)
    if job.state.is_live:
        print(f"dtf: {known.title} was asked to end")
        return True
    print(f"dtf: {known.title} is {job.state.value} ({plain_text(job.detail)}); it was asked to end, should it live")
    return not is_locked(folder)


def _cancel_sweep(folder: Path) -> int:
    """End a sweep that starts its trials itself. Where its process is gone, the jobs that it has left."""
    if is_locked(folder):
        return _signal_holder(folder)
    ended, first = False, None
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            ended |= _cancel_job(path)
        except DtfError as error:  # of one trial; the others are to end all the same
            first = first or error
    if first:
        raise first
    if not ended:
        print(f"dtf: nothing to end: no sweep lives in {folder}, and no job of its trials")
    return Exit.OK


def _signal_holder(folder: Path) -> int:
    """Ask the process that holds a folder to stop. ConfigError where it runs on another host."""
    try:
        holder = small_text(folder / LOCK)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / LOCK} cannot be read ({type(error).__name__}: {error})") from error
    process = re.fullmatch(r"process ([0-9]{1,9}) on (.*)\n", holder)
    if process is None or process[2] != socket.gethostname():
        raise ConfigError(f"{folder} is in use by a live run ({holder.strip()}); end it there")
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(int(process[1]), signal.SIGTERM)
    print(f"dtf: {plain_text(process[0].strip())} was asked to end")
    return Exit.OK


def _state(known: record.JobRecord) -> JobState:
    """PeerError, with the way out, where the scheduler does not answer."""
    try:
        return known.platform.state(known.handle)
    except PeerError as error:
        raise PeerError(f"{error}; if {known.title} is gone for good, job.forget=true sets its record aside") from error


def _forget(folder: Path, known: record.JobRecord | None) -> int:
    if known is None:
        raise ConfigError(f"job.forget=true: {folder} has no record of a submitted job")
    print(f"dtf: {known.title} is forgotten, not ended: its record is now {record.set_aside(folder)}")
    return Exit.OK
