"""`-m`: one run per combination of values. Hydra's sweeper and launcher decide which trials run and in what order. Each
trial starts new ranks.

This process does not import torch, so it can run any number of trials. Which trials are finished is read from their
folders, whose names are the overrides that only some trials have.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from dtf.api.schema import show
from dtf.cli.optuna_search import OptunaSearch
from dtf.cli.sweep_overrides import as_typed, combinations, distinct, title_of
from dtf.cli.trials import NOT_STARTED, Trial, best_of, digest, finished, folder_name, seconds, table
from dtf.config.advice import print_notes
from dtf.config.defaults_lists import YamlFile
from dtf.config.hydra_internals import Callbacks
from dtf.config.hydra_sources import OPTUNA, Loader, OptunaOptions
from dtf.config.messages import display_path, parse
from dtf.core.errors import INTERRUPTED, BusyError, ConfigError, Exit
from dtf.core.text import time_text
from dtf.runs.budget import limit_s
from dtf.runs.run_folder import take_lock

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from dtf.config.compose import Composed, Composer

_ENDS = (Exit.PREEMPTED, Exit.BUDGET, INTERRUPTED)
"""Codes of a trial that end the sweep too."""


@runtime_checkable
class JobWithFolder(Protocol):
    """A job whose run is kept in a folder; other jobs have an exit code only."""

    folder: Path | None  # of the run; set before `run`
    elsewhere_s: float  # seconds of its budget that other runs have spent; set before `run`
    best: tuple[str, float] | None  # the objective and its best value


class _SweepStopped(BaseException):
    """A trial was asked to stop, and so is the sweep. No Exception: Hydra's launcher would go on to the next trial."""


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


class _TrialLoader(Loader):
    """Composes each trial that Hydra launches as a single run is composed."""

    def __init__(self, composer: Composer) -> None:
        super().__init__(composer.loader.get_search_path())
        self._composer = composer
        self.scratch = ""  # a folder for the copy of the config that Hydra insists on
        self.reads: dict[str, YamlFile] = {}  # of the latest trial

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        config, self.reads = self._composer.load(overrides)
        with read_write(config.hydra):
            config.hydra.sweep.dir = self.scratch
        return config


def sweep(composer: Composer, overrides: Sequence[str], run: Callable[[Callable[[], int]], int]) -> int:
    """Check every trial, then run those that are not finished. `run` calls a function, reports what it raises, and
    returns an exit code.

    Returns the exit code of the trial which stopped the sweep, else the first that is not 0. ConfigError before the
    first trial starts when one of them cannot be composed.
    """
    plan = _make_plan(composer, overrides)
    trials = _Trials(plan, run)
    with tempfile.TemporaryDirectory(prefix="dtf-sweep-") as scratch, _LockedFolder(plan.folder), trials.requests:
        try:
            _hand_to_hydra(plan, trials, scratch)
        except _SweepStopped:
            print("dtf: the sweep stops here", file=sys.stderr)
    done = trials.done
    if plan.complete:
        done += [Trial(title=title_of(trial, plan.shared), code=NOT_STARTED) for trial in plan.trials[len(done) :]]
    _print_result(done, plan)
    return trials.stopped or next((trial.code for trial in done if trial.code > 0), 0)


@dataclass(frozen=True)
class _Plan:
    """What a sweep is to do."""

    composer: Composer
    overrides: Sequence[str]  # of the command line
    parsed: list[Override]  # the same, parsed
    shared: set[str]  # overrides that all trials have
    trials: list[list[str]]  # the overrides of each
    complete: bool  # whether these are all; else a sweeper chooses values as it goes, and there is one possible trial
    first: Composed  # the first trial
    folder: Path | None  # of the sweep, where runs are kept

    @property
    def of_all(self) -> str:
        """` of N`, for counting trials, where N is known and more than 1."""
        return f" of {len(self.trials)}" if self.complete and len(self.trials) > 1 else ""


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
    return _Plan(composer, overrides, parsed, shared, trials, complete, first, folder)


class _Trials:
    """Runs the trials that Hydra's sweeper asks for, one after the other."""

    def __init__(self, plan: _Plan, run: Callable[[Callable[[], int]], int]) -> None:
        self._plan, self._run = plan, run
        self.loader = _TrialLoader(plan.composer)
        self.requests = _StopRequests()
        self.done: list[Trial] = []  # those that were started
        self.stopped = 0  # the exit code of the trial that stopped the sweep

    def start(self, config: DictConfig) -> float:
        """Run one trial, which Hydra composed. Returns its best objective where runs are kept, NaN where there is none;
        else its exit code.
        """
        plan, hydra = self._plan, HydraConfig.get()
        overrides = [str(text) for text in hydra.overrides.task]
        trial = Trial(title=title_of(overrides, plan.shared))
        self.done.append(trial)
        print(f"dtf: trial {len(self.done)}{plan.of_all}: {trial.title}", flush=True)

        def finish() -> int:
            OmegaConf.set_struct(config, False)
            OmegaConf.set_readonly(config, False)
            config.hydra = hydra
            composed = plan.composer.finish(config, [*hydra.overrides.hydra, *overrides], self.loader.reads)
            print_notes(composed.notes)
            _check_trial(plan.first, composed)
            folder = plan.folder / folder_name(distinct(overrides, plan.shared)) if plan.folder else None
            return _run_trial(composed, trial, folder)

        trial.code = self._run(finish)
        if trial.code in _ENDS or self.requests:
            self.stopped = trial.code or Exit.PREEMPTED
            raise _SweepStopped
        if plan.folder is None:
            return trial.code
        return trial.best[1] if trial.code == Exit.OK and trial.best else math.nan


def _hand_to_hydra(plan: _Plan, trials: _Trials, scratch: str) -> None:
    """Let Hydra's sweeper start the trials. `scratch`: a folder that is gone afterwards."""
    trials.loader.scratch = scratch
    # Hydra's own multirun composes without the options swept over, so that keys which only those have would be unknown.
    config = trials.loader.load_configuration(None, plan.trials[0], RunMode.MULTIRUN)
    arguments = [override for override in plan.parsed if not override.is_hydra_override()]
    config.hydra.overrides.task = [str(override.input_line) for override in arguments]
    context = HydraContext(config_loader=trials.loader, callbacks=Callbacks())
    plan.composer.with_plugins(
        plan.overrides, lambda: _run_sweeper(config, context, trials.start, arguments, plan.first, plan.folder)
    )


def _print_result(done: Sequence[Trial], plan: _Plan) -> None:
    """The table of trials, and what became of the sweep."""
    for line in table(done):
        print(line)
    if plan.folder:
        print(_total(done, plan.first, plan.folder))
    failed = [f"{trial.title} ({trial.outcome})" for trial in done if trial.code > 0 and trial.code not in _ENDS]
    if failed:
        print(
            f"dtf: {len(failed)} of {len(done)} trials failed: {', '.join(failed)}; the same sweep started again runs "
            "them once more",
            file=sys.stderr,
        )


def _run_sweeper(
    config: DictConfig,
    context: HydraContext,
    start: Callable[[DictConfig], float],
    arguments: list[Override],
    first: Composed,
    folder: Path | None,
) -> None:
    """Let the chosen sweeper launch trials. Optuna's is ours, any other a plugin of Hydra."""
    plugins = Plugins.instance()
    if first.tree.hydra.runtime.choices.get("hydra/sweeper") != OPTUNA:
        plugins.instantiate_sweeper(config=config, hydra_context=context, task_function=start).sweep(
            [str(override.input_line) for override in arguments]
        )
        return
    if folder is None or first.settings.train.eval_every == 0:
        raise ConfigError(
            f"hydra/sweeper={OPTUNA} needs an objective: a job that trains, with evaluations (train.eval_every)"
        )
    options = OptunaOptions(**OmegaConf.to_container(config.hydra.sweeper))  # type: ignore[arg-type]
    launcher = plugins.instantiate_launcher(config=config, hydra_context=context, task_function=start)

    def launch(overrides: Sequence[str], number: int) -> float:
        return launcher.launch([list(overrides)], initial_job_idx=number)[0].return_value  # type: ignore[return-value]

    OptunaSearch(options, arguments, _objective(first)[1], folder).run(launch)


def _run_trial(composed: Composed, trial: Trial, folder: Path | None) -> int:
    job = composed.job
    if folder is None or not isinstance(job, JobWithFolder):
        return job.run(composed)
    trial.folder = folder
    if mirror := composed.config["checkpoint"].get("mirror"):  # it belongs to one run, as a run folder does
        composed.config["checkpoint"]["mirror"] = f"{mirror.rstrip('/')}/{folder.parent.name}/{folder.name}"
    record = finished(folder, composed.config)
    if record is not None:
        trial.before, trial.best = (
            True,
            (str(record["best"][0]), float(record["best"][1])) if record.get("best") else None,
        )
        print("dtf: it was finished before", flush=True)
        return Exit.OK
    limited = limit_s(composed.settings.budget) < math.inf
    job.folder, job.elsewhere_s = folder, seconds(folder.parent, folder, needed=limited)
    try:
        return job.run(composed)
    finally:
        trial.best = job.best


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
    return Path(
        config["run"]["dir"] or Path("outputs", config["run"]["name"] or config["recipe"]["name"], f"sweep-{same}")
    ).absolute()


def _check_trial(first: Composed, other: Composed) -> None:
    """Raise ConfigError for a launcher that cannot start ranks again, and for a trial with another run folder or budget
    than the first.
    """
    if not isinstance(other.job, JobWithFolder):
        return
    if not other.settings.launcher.starts_ranks:
        name = other.config["launcher"]["name"]
        raise ConfigError(
            f"launcher={name} takes part as a rank that others started, for one run; a sweep starts its own ranks: "
            "use launcher=local"
        )
    for group, names in (("run", ("dir", "name")), ("budget", tuple(first.config["budget"]))):
        for name in names:
            value, other_value = first.config[group][name], other.config[group][name]
            if value != other_value:
                raise ConfigError(
                    f"{group}.{name}={show(other_value)} is {show(value)} in another trial; {group}.{name} belongs to "
                    "the whole sweep, give one value"
                )


def _objective(composed: Composed) -> tuple[str, str]:
    """The metric that says how good a trial is, and `max` or `min`."""
    settings = composed.settings
    name = settings.run.objective or settings.recipe.objective[0]
    return name, settings.recipe.direction(name)


def _total(done: Sequence[Trial], first: Composed, folder: Path) -> str:
    """The last line: trials that finished, the best of them, time and cost, the folder."""
    parts = [f"{sum(trial.code == Exit.OK for trial in done)} of {len(done)} trials finished"]
    number = best_of(done, _objective(first)[1])
    if number is not None:
        parts.append(f"the best is trial {number}")
    spent, price = seconds(folder), first.settings.budget.cost_per_hour
    parts.append(f"{time_text(spent)} in all" + (f" at a cost of {spent / 3600 * price:.3g}" if price else ""))
    return f"dtf: {', '.join(parts)}, in {display_path(folder)}"


def _composed(composer: Composer, overrides: list[str], name: str) -> Composed:
    try:
        return composer.compose(overrides)
    except ConfigError as error:
        raise ConfigError(f"{name}{error}") from error
