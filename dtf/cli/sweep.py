"""`-m`: one run per combination of values. Hydra's sweeper decides which trials there are, a schedule which runs when.

This process does not import torch, so it can run any number of trials. Which trials are finished is read from their
folders, whose names are the overrides that only some trials have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dtf.api.options import Prune
from dtf.api.trials import TrialExecutor
from dtf.cli.hydra_sweep import HydraSweep, OptunaTrials
from dtf.cli.optuna_search import OptunaSearch
from dtf.cli.run_trial import HereExecutor, Reported
from dtf.cli.schedule import Schedule, SweepStopped, as_trial
from dtf.cli.slots import SlotExecutor
from dtf.cli.submitted_sweep import each_as_a_job, show_first, submit_together
from dtf.cli.sweep_plan import SweepPlan, check_trial, make_plan
from dtf.cli.trials import ENDS, Trial, best_of, seconds, table
from dtf.cluster.submit import refuse_live
from dtf.config.advice import print_notes
from dtf.config.hydra_sources import OPTUNA
from dtf.core.errors import BusyError, ConfigError, Exit
from dtf.core.text import display_path, time_text
from dtf.host.scratch import scratch_folder
from dtf.launch import forkserver_cache
from dtf.runs.run_folder import take_lock
from dtf.runs.sweep_record import SweepRecord

if TYPE_CHECKING:
    from dtf.cluster.platform import Platform
    from dtf.config.compose import Composed, Composer


class _StopRequests:
    """True once SIGINT, SIGTERM or SIGHUP came, whichever code handles them.

    The exit code of a trial does not say it: a launcher that has to kill its ranks reports lost ranks, not a request.
    """

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._numbers: set[int] = set()
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._main:
            signal.set_wakeup_fd(self._before)
        self._receiver.close()
        self._sender.close()

    def __bool__(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._numbers |= set(self._receiver.recv(4096))
        return bool(self._numbers & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def sweep(composer: Composer, overrides: Sequence[str], reported: Reported) -> int:
    """Check every trial, then run those that are not finished. `reported` calls a function, reports what it raises, and
    returns an exit code.

    Returns the exit code of the trial which stopped the sweep, else the first that is not 0. ConfigError before the
    first trial starts when one of them cannot be composed.
    """
    plan = make_plan(composer, overrides)
    decides = not plan.complete or plan.options.prune is not Prune.none
    if plan.platform is not None and (plan.platform.dry_run or not decides):
        return _submit(plan, plan.platform, decides)
    with ExitStack() as stack:
        scratch = str(stack.enter_context(scratch_folder("dtf-sweep-")))
        stack.enter_context(_LockedFolder(plan.folder))
        requests = stack.enter_context(_StopRequests())
        record = None
        if plan.folder:
            refuse_live(plan.folder)
            record = SweepRecord(plan.folder, plan.first.config["sweep"], plan.first.settings.objective)
        hydra = HydraSweep(composer, plan.trials[0], plan.arguments, scratch)
        executor = stack.enter_context(_executor(plan, reported, requests.__bool__))

        def compose(number: int, words: list[str]) -> Composed:
            composed = hydra.compose(number, words)
            print_notes(composed.notes)
            check_trial(plan.first, composed)
            return composed

        schedule = Schedule(plan.rules, executor, compose, reported, requests.__bool__, record)
        try:
            composer.with_plugins(overrides, lambda: _run(plan, hydra, schedule))
        except SweepStopped:
            schedule.stopped = schedule.stopped or Exit.PREEMPTED  # by a signal while no trial ran
            print("dtf: the sweep stops here", file=sys.stderr)
        schedule.close()
        done = {number: trial.shown for number, trial in sorted(schedule.trials.items())}
        code = schedule.stopped or next((trial.code for trial in done.values() if trial.code > 0), 0)
        if record:
            record.end(code)
    _print_result(plan.with_those_not_started(done), plan)
    return code


def _submit(plan: SweepPlan, platform: Platform, decides: bool) -> int:
    """Hand all trials to a scheduler at once, or print that. `decides`: which trials there are, or go on, is decided by
    what others come to; then the first one is printed. Returns the exit code.
    """
    folders = [plan.rules.folder_of(trial) for trial in plan.trials]
    trials = [(folder, as_trial(one, folder)) for folder, one in zip(folders, plan.composed, strict=True) if folder]
    if platform.dry_run:
        if decides:
            return show_first(platform, *trials[0])
        return submit_together(platform, trials, plan.options.parallel, None)
    with _LockedFolder(plan.folder):
        record = SweepRecord(trials[0][0].parent, plan.first.config["sweep"], plan.first.settings.objective)
        return submit_together(platform, trials, plan.options.parallel, record)


@contextmanager
def _executor(plan: SweepPlan, reported: Reported, requested: Callable[[], bool]) -> Iterator[TrialExecutor]:
    """What runs the trials: this process, slots, or jobs of a scheduler."""
    if plan.platform is not None:
        with each_as_a_job(plan.platform, plan.options.parallel or plan.rules.trials or 1, requested) as jobs:
            yield jobs
        return
    if plan.options.places == 1:
        yield HereExecutor(reported)
        return
    forkserver_cache.shut_down()  # each slot has its own
    with SlotExecutor(plan.options.places) as executor:
        yield executor


def _run(plan: SweepPlan, hydra: HydraSweep, schedule: Schedule) -> None:
    """Let the chosen sweeper have its trials run. Optuna's is ours, any other a plugin of Hydra."""
    if plan.sweeper != OPTUNA:
        hydra.run(schedule)
        return
    if plan.folder is None or plan.first.settings.train.eval_every == 0:
        raise ConfigError(
            f"hydra/sweeper={OPTUNA} needs an objective: a job that trains, with evaluations (train.eval_every)"
        )
    search = OptunaSearch(plan.optuna, plan.arguments, plan.first.settings.objective[1], plan.folder)
    schedule.run(OptunaTrials(search))


def _print_result(done: Sequence[Trial], plan: SweepPlan) -> None:
    """The table of trials, and what became of the sweep."""
    for line in table(done):
        print(line)
    if plan.folder:
        print(_total(done, plan, plan.folder))
    failed = [f"{trial.title} ({trial.cause})" for trial in done if trial.code > 0 and trial.code not in ENDS]
    if failed:
        print(
            f"dtf: {len(failed)} of {len(done)} trials failed: {', '.join(failed)}; the same sweep started again runs "
            "them once more",
            file=sys.stderr,
        )


class _LockedFolder:
    """Makes the folder of a sweep, and locks it for this process. Does nothing where there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (self._folder / "run.json").exists():
                raise BusyError(
                    f"{self._folder} is the folder of one run, a sweep needs one of its own; choose another run.dir"
                )
            self._lock = take_lock(self._folder)
        except OSError as error:
            raise ConfigError(
                f"the sweep's folder {self._folder} cannot be used: {error.strerror}; choose another run.dir"
            ) from error

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            os.close(self._lock)


def _total(done: Sequence[Trial], plan: SweepPlan, folder: Path) -> str:
    """The last line: trials that finished, the best of them, time and cost, the folder."""
    whole, pruned = [trial for trial in done if trial.rung is None], sum(trial.pruned for trial in done)
    parts = [f"{sum(trial.code == Exit.OK for trial in whole)} of {len(done)} trials finished"]
    parts += [f"{pruned} pruned"] if pruned else []
    number = best_of(done, plan.first.settings.objective[1])
    if number is not None:
        parts.append(f"the best is trial {number}")
    spent, price = seconds(folder), plan.first.settings.budget.cost_per_hour
    if price and plan.platform is None:
        price /= plan.options.places  # each of them occupies its share
    parts.append(f"{time_text(spent)} in all" + (f" at a cost of {spent / 3600 * price:.3g}" if price else ""))
    return f"dtf: {', '.join(parts)}, in {display_path(folder)}"
