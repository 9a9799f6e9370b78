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
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from omegaconf import OmegaConf

from dtf.api.options import Prune, SweepOptions
from dtf.api.schema import build, show
from dtf.api.trials import TrialExecutor
from dtf.cli.hydra_sweep import HydraSweep, OptunaTrials
from dtf.cli.optuna_search import OptunaSearch
from dtf.cli.run_trial import HereExecutor, JobWithFolder, Reported
from dtf.cli.schedule import ENDS, Rules, Schedule, SweepStopped, as_trial
from dtf.cli.slots import SIDE_BY_SIDE, SlotExecutor, share_of_cores, share_of_devices
from dtf.cli.submitted_sweep import each_as_a_job, platform_of, show_first, submit_together
from dtf.cli.sweep_overrides import as_typed, combinations, distinct, title_of
from dtf.cli.trials import NOT_STARTED, Trial, best_of, digest, folder_name, seconds, table
from dtf.config.advice import print_notes
from dtf.config.hydra_sources import BASIC_SWEEPER, OPTUNA, OptunaOptions
from dtf.config.messages import display_path, parse
from dtf.core.errors import BusyError, ConfigError, Exit
from dtf.core.text import time_text
from dtf.launch import forkserver_cache
from dtf.runs.run_folder import take_lock
from dtf.runs.sweep_record import SweepRecord

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

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
    plan = _make_plan(composer, overrides)
    decides = not plan.complete or plan.options.prune is not Prune.none
    if plan.platform is not None and (plan.platform.dry_run or not decides):
        return _submit(plan, plan.platform, decides)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dtf-sweep-"))
        stack.enter_context(_LockedFolder(plan.folder))
        requests = stack.enter_context(_StopRequests())
        record = SweepRecord(plan.folder, plan.first.config["sweep"]) if plan.folder else None
        hydra = HydraSweep(composer, plan.trials[0], plan.arguments, scratch)
        executor = stack.enter_context(_executor(plan, reported, requests.__bool__))

        def compose(number: int, words: list[str]) -> Composed:
            composed = hydra.compose(number, words)
            print_notes(composed.notes)
            _check_trial(plan.first, composed)
            return composed

        schedule = Schedule(plan.rules, executor, compose, reported, requests.__bool__, record)
        try:
            composer.with_plugins(overrides, lambda: _run(plan, hydra, schedule))
        except SweepStopped:
            print("dtf: the sweep stops here", file=sys.stderr)
        schedule.close()
        done = {number: trial.shown for number, trial in sorted(schedule.trials.items())}
        code = schedule.stopped or next((trial.code for trial in done.values() if trial.code > 0), 0)
        if record:
            record.end(code)
    _print_result(plan.with_those_not_started(done), plan)
    return code


@dataclass(frozen=True)
class _Plan:
    """What a sweep is to do."""

    overrides: Sequence[str]  # of the command line
    parsed: list[Override]  # the same, parsed
    shared: set[str]  # overrides that all trials have
    trials: list[list[str]]  # the overrides of each
    complete: bool  # whether these are all; else a sweeper chooses values as it goes, and there is one possible trial
    composed: list[Composed]  # the same, composed
    folder: Path | None  # of the sweep, where runs are kept

    @property
    def first(self) -> Composed:
        return self.composed[0]

    @property
    def platform(self) -> Platform | None:
        """The scheduler that the trials are handed to; None: they run on this host."""
        return platform_of(self.first) if self.folder else None

    @property
    def options(self) -> SweepOptions:
        return build(SweepOptions, self.first.config["sweep"])

    @property
    def arguments(self) -> list[Override]:
        """The overrides that are not for Hydra."""
        return [override for override in self.parsed if not override.is_hydra_override()]

    @property
    def sweeper(self) -> str:
        return self.first.tree.hydra.runtime.choices.get("hydra/sweeper") or BASIC_SWEEPER

    @property
    def optuna(self) -> OptunaOptions:
        """The options of the search. Where there is none, its defaults."""
        node = OmegaConf.to_container(self.first.tree.hydra.sweeper) if self.sweeper == OPTUNA else {}
        return OptunaOptions(**node)  # type: ignore[arg-type]

    @property
    def rules(self) -> Rules:
        known = len(self.trials) if self.complete else self.optuna.n_trials if self.sweeper == OPTUNA else None
        of_all = f" of {len(self.trials)}" if self.complete and len(self.trials) > 1 else ""
        objective = self.first.settings.objective if self.folder else ("", "max")
        return Rules(self.options, objective, known, of_all, self._title_of, self._folder_of)

    def with_those_not_started(self, begun: Mapping[int, Trial]) -> list[Trial]:
        """Trials for the table, by number: where a sweep was stopped, some have not been begun."""
        titles = [self._title_of(trial) for trial in self.trials] if self.complete else []
        rest = {number: Trial(title=title, code=NOT_STARTED) for number, title in enumerate(titles, 1)}
        return [trial for _, trial in sorted((rest | dict(begun)).items())]

    def _title_of(self, overrides: Sequence[str]) -> str:
        return title_of(_without_hydra(overrides), self.shared)

    def _folder_of(self, overrides: Sequence[str]) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / folder_name(distinct(_without_hydra(overrides), self.shared))


def _without_hydra(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.startswith(("hydra.", "hydra/"))]


def _make_plan(composer: Composer, overrides: Sequence[str]) -> _Plan:
    """The trials of a sweep. ConfigError for one that cannot be composed, or does not agree with the first."""
    parsed = parse(overrides, composer.loader)
    swept = [override for override in parsed if override.is_sweep_override()]
    fixed = [override for override in parsed if not override.is_sweep_override()]
    shared = {as_typed(f"{override.get_key_element()}={override.get_value_element_as_str()}") for override in fixed}
    trials, complete = combinations(parsed)
    several = complete and len(trials) > 1
    composed = [
        _composed(composer, trial, f"trial {number} of {len(trials)} ({title_of(trial, shared)}): " if several else "")
        for number, trial in enumerate(trials, 1)
    ]
    first = composed[0]
    for config in composed:
        _check_trial(first, config)
    is_kept = isinstance(first.job, JobWithFolder)
    folder = _sweep_folder([str(override.input_line) for override in swept], composed) if is_kept else None
    plan = _Plan(overrides, parsed, shared, trials, complete, composed, folder)
    _check_rules(plan, composed)
    return plan


def _submit(plan: _Plan, platform: Platform, decides: bool) -> int:
    """Hand all trials to a scheduler at once, or print that. `decides`: which trials there are, or go on, is decided by
    what others come to; then the first one is printed. Returns the exit code.
    """
    folders = [plan.rules.folder_of(trial) for trial in plan.trials]
    trials = [(folder, as_trial(one, folder)) for folder, one in zip(folders, plan.composed, strict=True) if folder]
    if platform.dry_run:
        return show_first(platform, *trials[0]) if decides else submit_together(platform, trials, plan.options.parallel)
    with _LockedFolder(plan.folder):
        SweepRecord(trials[0][0].parent, plan.first.config["sweep"])
        return submit_together(platform, trials, plan.options.parallel)


@contextmanager
def _executor(plan: _Plan, reported: Reported, requested: Callable[[], bool]) -> Iterator[TrialExecutor]:
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


def _run(plan: _Plan, hydra: HydraSweep, schedule: Schedule) -> None:
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


def _print_result(done: Sequence[Trial], plan: _Plan) -> None:
    """The table of trials, and what became of the sweep."""
    for line in table(done):
        print(line)
    if plan.folder:
        print(_total(done, plan, plan.folder))
    failed = [f"{trial.title} ({trial.outcome})" for trial in done if trial.code > 0 and trial.code not in ENDS]
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


def _sweep_folder(swept: list[str], composed: Sequence[Composed]) -> Path:
    """The folder of the sweep: `run.dir`, or one whose name is the same whenever the same sweep is started."""
    config = composed[0].config
    options = OmegaConf.to_container(composed[0].tree.hydra.sweeper)
    assert isinstance(options, dict)
    options.pop("n_trials", None)  # more trials go on
    same = digest([*swept, str(sorted(options.items(), key=str))], [config.config for config in composed])
    platform = platform_of(composed[0])
    run_dir = config["run"]["dir"] if platform is None or platform.sees_folder else ""  # else a place of the job
    return Path(
        run_dir or Path("outputs", config["run"]["name"] or config["recipe"]["name"], f"sweep-{same}")
    ).absolute()


def _check_rules(plan: _Plan, trials: Sequence[Composed]) -> None:
    """Raise ConfigError for options of the sweep that these trials cannot follow."""
    options = plan.options
    if not options.given:
        return
    if plan.folder is None:
        raise ConfigError(
            f"{options.given[0]} is for jobs that keep each trial in a folder, as job=train does; leave it out"
        )
    if options.places > 1 and plan.platform is None:
        share_of_cores(options.places)
        for trial in trials:
            share_of_devices(trial.config["launcher"], 0, options.places)
    if options.prune is Prune.none:
        if options.factor != SweepOptions().factor:
            raise ConfigError(f"sweep.factor={options.factor} is of sweep.prune, which is none; choose asha or median")
        return
    _check_pruning(plan, f"sweep.prune={options.prune.name}", trials)


def _check_pruning(plan: _Plan, given: str, trials: Sequence[Composed]) -> None:
    """Raise ConfigError where trials cannot stop at rungs, or cannot be compared there."""
    if plan.sweeper not in (BASIC_SWEEPER, OPTUNA):
        raise ConfigError(
            f"{given} goes with a list of values and with hydra/sweeper={OPTUNA}; hydra/sweeper={plan.sweeper} waits "
            "for the ends of its trials"
        )
    number, factor = plan.rules.trials, plan.options.factor
    if plan.options.prune is Prune.asha and number is not None and number < factor:
        raise ConfigError(
            f"{given} lets one trial in sweep.factor={factor} go on, and there are {number}; give more values, or a "
            "smaller factor"
        )
    for config in (trial.config for trial in trials):
        train, checkpoint, launcher = config["train"], config["checkpoint"], config["launcher"]["name"]
        refused = [
            (train["eval_every"] == 0, "compares evaluations, and train.eval_every=0 turns them off; give it steps"),
            (train["until"] is not None, "sets train.until of its trials; leave it out"),
            (checkpoint["every_steps"] == 0, "needs checkpoints to go on from; use checkpoint=every"),
            (checkpoint["resume"] == "never", "goes on from checkpoints; use checkpoint.resume=auto"),
            (
                launcher not in SIDE_BY_SIDE and plan.platform is None,
                f"does not go with launcher={launcher}; use launcher=local, or one that submits each trial",
            ),
        ]
        for wrong, text in refused:
            if wrong:
                raise ConfigError(f"{given} {text}")


def _check_trial(first: Composed, other: Composed) -> None:
    """Raise ConfigError for a launcher that cannot start ranks again, and for a trial with another run folder or budget
    than the first, or with other options of the sweep.
    """
    if not isinstance(other.job, JobWithFolder):
        return
    if not other.settings.launcher.starts_ranks and platform_of(other) is None:
        name = other.config["launcher"]["name"]
        raise ConfigError(
            f"launcher={name} takes part as a rank that others started, for one run; a sweep starts its own ranks: "
            "use launcher=local"
        )
    for group, names in (
        ("run", ("dir", "name")),
        ("budget", tuple(first.config["budget"])),
        ("sweep", tuple(first.config["sweep"])),
    ):
        for name in names:
            value, other_value = first.config[group][name], other.config[group][name]
            if value != other_value:
                raise ConfigError(
                    f"{group}.{name}={show(other_value)} is {show(value)} in another trial; {group}.{name} belongs to "
                    "the whole sweep, give one value"
                )


def _total(done: Sequence[Trial], plan: _Plan, folder: Path) -> str:
    """The last line: trials that finished, the best of them, time and cost, the folder."""
    pruned = sum(trial.pruned is not None for trial in done)
    parts = [f"{sum(trial.code == Exit.OK for trial in done) - pruned} of {len(done)} trials finished"]
    parts += [f"{pruned} pruned"] if pruned else []
    number = best_of(done, plan.first.settings.objective[1])
    if number is not None:
        parts.append(f"the best is trial {number}")
    spent, price = seconds(folder), plan.first.settings.budget.cost_per_hour
    if price and plan.platform is None:
        price /= plan.options.places  # each of them occupies its share
    parts.append(f"{time_text(spent)} in all" + (f" at a cost of {spent / 3600 * price:.3g}" if price else ""))
    return f"dtf: {', '.join(parts)}, in {display_path(folder)}"


def _composed(composer: Composer, overrides: list[str], name: str) -> Composed:
    try:
        return composer.compose(overrides)
    except ConfigError as error:
        raise ConfigError(f"{name}{error}") from error
