"""A sweep that a scheduler runs: one job with all trials where they are known, else a job for each as it is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import name_of
from dtf.cli.schedule import as_trial
from dtf.cli.trials import digest, find
from dtf.cluster import record
from dtf.cluster.bundle import unpacked
from dtf.cluster.platform import JOB_FOLDER, Platform, job_name
from dtf.cluster.submit import hand_over, is_submitted, live_job, request_of
from dtf.cluster.trial_jobs import TrialJobs
from dtf.core.errors import ConfigError, DataError, Exit
from dtf.host.signals import Stop
from dtf.runs.sweep_record import FILE, SweepRecord, finished

if TYPE_CHECKING:
    from dtf.config.compose import Composed


def platform_of(composed: Composed) -> Platform | None:
    """What the trials are handed to; None: they run on this host."""
    if not is_submitted(composed):
        return None
    launcher = composed.settings.launcher
    assert isinstance(launcher, Platform)
    return launcher


def submit_together(
    platform: Platform, trials: Sequence[tuple[Path, Composed]], parallel: int, kept: SweepRecord | None
) -> int:
    """Hand the trials that are not finished, and have no job of their own, to the scheduler as one job; or print it
    where `launcher.dry_run` says so. Each has its folder, and what a sweep decides of a trial is in its config.
    Returns the exit code. `kept`: what the scheduler says of earlier trials goes there; None: nowhere.

    ConfigError; BusyError for a folder that a live job has, or which holds another trial.
    """
    home, first = trials[0][0].parent, trials[0][1]
    name, run_dir = job_name(home.parent.name, home.name), str(home)
    if platform.sees_folder:
        trials = [
            (folder, one) for folder, one in trials if (found := find(folder, one.config)) is None or not found.finished
        ]
    else:
        run_dir = first.config["run"]["dir"] or platform.default_run_dir(job_name(home.parent.name), home.name)
        done = finished(home) | (new := _finished_elsewhere(home, name))
        if kept is not None:
            kept.finish(new)
        place = _place(platform, run_dir, name)
        trials = [(folder, one) for folder, one in trials if done.get(folder.name) != digest([place], [one.config])]
    jobs = {folder: job for folder, _ in trials if (job := live_job(folder)) is not None}
    for folder, job in jobs.items():
        print(f"dtf: {folder.name} is left to {job}")
    trials = [(folder, one) for folder, one in trials if folder not in jobs]
    if not trials:
        again = "" if platform.sees_folder else f"; {home / FILE} keeps that: remove the entry of one to run it again"
        print(f"dtf: all {'other ' if jobs else ''}trials were finished before{again}")
        return Exit.OK
    _check_alike([one for _, one in trials], platform)
    composed, names = [one for _, one in trials], [folder.name for folder, _ in trials]
    return hand_over(platform, request_of(platform, composed, home, run_dir, name, names, parallel))


def _finished_elsewhere(home: Path, name: str) -> dict[str, str]:
    """Of the last job of a sweep whose folders are not seen from here, by its scheduler: name of a trial that has
    finished -> digest of its config and place. Nothing while a submission is cut off, which is to be made as it was.
    """
    if record.intent(home) or (known := record.find(home)) is None:
        return {}
    try:
        with unpacked(home / JOB_FOLDER / "bundle.zip", known.digest) as content:
            runs = content.bundle.runs
    except (ConfigError, DataError):  # of a later submission that was refused: what was finished is kept since then
        return {}
    place = _place(known.platform, known.run_dir, name)
    numbers = known.platform.finished_trials(known.handle, len(runs))
    return {Path(runs[number].run_dir).name: digest([place], [runs[number].config]) for number in sorted(numbers)}


def _place(platform: Platform, run_dir: str, name: str) -> str:
    return f"{name_of('launcher', platform)}:{platform.place(run_dir, name)}"


def check_job(first: Composed, other: Composed) -> None:
    """Raise ConfigError for a trial that no job of its platform could run, and for another kind of job than the first.
    Nothing is wrong where trials run on this host.
    """
    if (platform := platform_of(other)) is None:
        return
    platform.check(as_trial(other, None).check(data=False).strategy)  # the data may only be where the job runs
    if other.config["launcher"] != first.config["launcher"]:
        raise ConfigError("launcher.* has several values, and all trials are jobs of one kind; give one value")


def _check_alike(trials: Sequence[Composed], platform: Platform) -> None:
    """Raise ConfigError for trials that one job cannot have side by side."""
    all_roles = [one.settings.strategy.roles(platform.count()) for one in trials]
    if platform.nodes > 1 and (other := next((roles for roles in all_roles if roles != all_roles[0]), None)):
        raise ConfigError(
            f"trials have {other} and {all_roles[0]} processes, and on launcher.nodes={platform.nodes} the scheduler "
            "places each of them; submit a sweep for each number"
        )


def show_first(platform: Platform, folder: Path, composed: Composed) -> int:
    """Print the job of one trial of a sweep that decides as it goes."""
    name = job_name(folder.parent.name, "1")
    return hand_over(platform, request_of(platform, [composed], folder, str(folder), name))


@contextmanager
def each_as_a_job(platform: Platform, places: int, requested: Callable[[], bool]) -> Iterator[TrialJobs]:
    """A context in which trials are submitted one by one. Signals to stop are counted, and passed on by `wait`."""
    jobs = TrialJobs(platform, places, requested)
    with Stop(), closing(jobs):
        yield jobs
