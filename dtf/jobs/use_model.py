"""Starts ranks that use a trained model: for evaluation, predictions and exports. Torch-free; trains nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.recipe import Recipe, Split
from dtf.api.row_storage import rows_removed
from dtf.checkpoint.resolve_path import check_weights_path
from dtf.cluster.submit import refuse_submitted
from dtf.core.errors import ConfigError, DtfError, Exit
from dtf.core.types import Event, Failed, Measured, Note
from dtf.host.deadline import deadline
from dtf.runs.run_folder import Run

if TYPE_CHECKING:
    from dtf.config.compose import Composed


def launch(composed: Composed, entry: str, splits: Collection[Split], one_rank: bool = False) -> Path | None:
    """Start ranks that run the function `entry`, and wait until they have ended.

    Returns the run folder; None in a process for which another one reports. `splits`: of the recipe's own data that
    are needed, if any. `one_rank`: only one rank may be started. ConfigError when there is no model; RanksEnded when
    the ranks fail.
    """
    model, weights = composed.config["job"]["model"], composed.settings.recipe.fine_tuning.weights
    if not model and not weights:
        raise ConfigError("job.model is not set; give a run folder, a checkpoint or a file of weights: job.model=PATH")
    check_weights_path(model, "job.model")
    if one_rank:
        if composed.config["launcher"].get("processes", 1) not in ("auto", 1):
            raise ConfigError(
                f"job={composed.config['job']['name']} is the work of one process; use launcher.processes=1"
            )
        composed = (
            composed.recompose(["launcher.processes=1"]) if "processes" in composed.config["launcher"] else composed
        )
    _check_one_role(composed)
    composed.settings.recipe.needed_splits = tuple(splits)
    settings = composed.check(data=bool(splits))
    launcher = settings.launcher
    launcher.check(settings.strategy)
    processes, devices = launcher.count(), launcher.devices_kind()

    def make(folder: str) -> Run:
        run = Run.open(composed.config, settings, processes, devices, folder, refuse_submitted)
        run.allot(deadline(os.environ) - time.time())
        return run

    run = launcher.open(composed.config, make, composed.command)
    exit, cause, raised = Exit.BUG, "an exception in the launching process", ""

    def see(event: Event) -> None:
        nonlocal cause, raised
        if isinstance(event, Failed):
            cause, raised = event.message, event.error
        print_event(event)

    try:
        with rows_removed(run.config):
            exit = Exit(launcher.launch(run, see, entry))
        cause = cause if exit else "finished"
    except DtfError as error:
        exit, cause, raised = error.exit, str(error), type(error).__name__
        raise
    finally:
        run.end(exit, cause, {"error": raised})
    if exit:
        raise RanksEnded(exit, run.folder)
    return run.folder if run.leader else None


def _check_one_role(composed: Composed) -> None:
    """Raise ConfigError for a strategy whose processes have several roles, such as servers and trainers."""
    strategy, config = composed.settings.strategy, composed.config
    roles = strategy.roles(composed.settings.launcher.count())
    if len(roles) > 1:
        name, choices = config["strategy"]["name"], composed.composer.options("strategy")
        raise ConfigError(
            f"strategy={name} has {' and '.join(f'{role}s' for role in roles)}, who train, and "
            f"job={config['job']['name']} uses a model that exists, in processes that are all alike; whatever trained "
            f"it, use {', '.join(choice for choice in choices if choice != name)}"
        )


def print_event(event: Event) -> None:
    """Print notes and progress to standard error."""
    match event:
        case Note(level, text):
            print(f"dtf: {level}: {text}", file=sys.stderr, flush=True)
        case Measured(what, done, _, _, values):
            rate = values[f"{what}_per_s"]
            print(
                f"dtf: {done:,} of {values[what]:,.0f} {what}, {rate:,.{0 if rate >= 10 else 1}f} {what}/s",
                file=sys.stderr,
                flush=True,
            )


def check_split(recipe: Recipe, split: Split) -> None:
    """Raise ConfigError for a split that the recipe's data do not have."""
    if split not in recipe.splits:
        raise ConfigError(
            f"job.split={split.value}: {type(recipe).__name__} has no such rows; use "
            f"{' or '.join(known.value for known in recipe.splits)}"
        )


class RanksEnded(Exception):
    """The ranks ended with an exit code other than 0; the launcher has printed why."""

    def __init__(self, exit: Exit, folder: Path) -> None:
        super().__init__(exit)
        self.exit, self.folder = exit, folder
