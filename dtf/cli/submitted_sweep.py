"""A sweep that a scheduler runs: one job with all trials where they are known, else a job for each as it is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.cli.schedule import as_trial
from dtf.cli.trials import find
from dtf.cluster.platform import Platform, job_name
from dtf.cluster.submit import hand_over, is_submitted, request_of
from dtf.cluster.trial_jobs import TrialJobs
from dtf.core.errors import ConfigError, Exit
from dtf.host.signals import Stop

if TYPE_CHECKING:
    from dtf.config.compose import Composed


def platform_of(composed: Composed) -> Platform | None:
    """What the trials are handed to; None: they run on this host."""
    if not is_submitted(composed):
        return None
    launcher = composed.settings.launcher
    assert isinstance(launcher, Platform)
    return launcher


def submit_together(platform: Platform, trials: Sequence[tuple[Path, Composed]], parallel: int) -> int:
    """Hand the trials that are not finished to the scheduler as one job, or print it where `launcher.dry_run` says so.
    Each has its folder, and what a sweep decides of a trial is in its config. Returns the exit code.

    ConfigError; BusyError for a folder that a live job has, or which holds another trial.
    """
    home, first = trials[0][0].parent, trials[0][1]
    if platform.sees_folder:
        trials = [
            (folder, one) for folder, one in trials if (found := find(folder, one.config)) is None or not found.finished
        ]
    if not trials:
        print("dtf: all trials were finished before")
        return Exit.OK
    _check_alike([one for _, one in trials], platform)
    run_dir = str(home)
    if not platform.sees_folder:
        run_dir = first.config["run"]["dir"] or platform.default_run_dir(job_name(home.parent.name), home.name)
    name = job_name(home.parent.name, home.name)
    composed, names = [one for _, one in trials], [folder.name for folder, _ in trials]
    return hand_over(platform, request_of(platform, composed, home, run_dir, name, names, parallel))


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
