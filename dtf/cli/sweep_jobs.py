"""Sweeps whose trials a scheduler runs, as the launcher says: all in one job where their values are known, else each as
a job of its own, which this process submits and watches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtf.api.options import SweepOptions
from dtf.api.schema import to_plain
from dtf.cli.run_trial import as_trial
from dtf.cli.trials import find
from dtf.cluster.platform import Platform, job_name
from dtf.cluster.submit import hand_over, request_of
from dtf.config.compose import Composed
from dtf.core.errors import ConfigError
from dtf.runs.budget import key, limit_s
from dtf.runs.sweep_record import SweepRecord


def platform_of(trial: Composed) -> Platform | None:
    """The platform to which the trials are submitted; None where they run here."""
    launcher = trial.settings.launcher
    return launcher if isinstance(launcher, Platform) and trial.job.submits else None


def check_platform(platform: Platform, trials: Sequence[Composed]) -> None:
    """Raise ConfigError for trials that no job could run, and for what the jobs of a sweep do not share."""
    roles = trials[0].settings.strategy.roles(platform.count())
    for trial in trials:
        strategy = as_trial(trial, None, SweepOptions()).check(data=False).strategy
        platform.check(strategy)
        if trial.config["launcher"] != trials[0].config["launcher"]:
            raise ConfigError("launcher.* has several values, and all trials are jobs of one kind; give one value")
        if platform.nodes > 1 and (other := strategy.roles(platform.count())) != roles:
            raise ConfigError(
                f"trials have {other} and {roles} processes, and on launcher.nodes={platform.nodes} the scheduler "
                "places each of them; submit a sweep for each number"
            )
    budget = trials[0].settings.budget
    if limit_s(budget) < math.inf:
        raise ConfigError(
            f"{key(budget)} is for all trials together, which are jobs that do not know of each other; give "
            "launcher.hours, the most that each start of a job may take"
        )


def submit_trials(
    platform: Platform, trials: Mapping[Path, Composed], folder: Path, options: SweepOptions
) -> int | None:
    """Submit the trials that are not finished, as one job. Returns the exit code; None where all are finished.

    `trials`: by their folders, in the folder of the sweep.
    """
    missing = {
        path: as_trial(one, path, options)
        for path, one in trials.items()
        if not ((found := find(path, one.config)) is not None and found.finished)
    }
    if not missing:
        return None
    config = next(iter(missing.values())).config
    run_dir = str(folder)
    if not platform.sees_folder:
        name = config["run"]["name"] or config["recipe"]["name"]
        run_dir = config["run"]["dir"] or platform.default_run_dir(job_name(name), folder.name)
    names = [path.name for path in missing]
    request = request_of(
        platform, list(missing.values()), folder, run_dir, job_name(folder.name), names, options.parallel or 0
    )
    code = hand_over(platform, request)
    if not platform.dry_run:
        SweepRecord(folder, to_plain(options))
    return code
