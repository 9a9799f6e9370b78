"""`-m`: one run per combination of values. Hydra's sweeper and launcher decide which and when; each trial starts fresh
ranks.

This process stays without torch, so any number of trials may follow each other in it. What a sweep has done already it
sees in the folders of its trials, which are named by what sets them apart.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from dtf.api.schema import show
from dtf.cli.optuna_search import Tuner
from dtf.cli.trials import NOT_STARTED, Trial, best_of, digest, finished, folder_name, seconds, table
from dtf.config.hydra_sources import OPTUNA, Loader, OptunaOptions, Read
from dtf.config.messages import COMMAND_LINE, parse, shorten
from dtf.core.errors import INTERRUPTED, BusyError, ConfigError, Exit
from dtf.core.text import time_text
from dtf.runs.run_folder import take_lock

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from dtf.config.compose import Composed, Composer

_ENDS = (Exit.PREEMPTED, Exit.BUDGET, INTERRUPTED)
"""Codes of a trial that end the sweep too."""


@runtime_checkable
class Kept(Protocol):
    """A job whose run is kept in a folder; other jobs have an exit code only."""

    folder: Path | None  # where the run is kept; set before `run`: there
    elsewhere_s: float  # of its budget, what other runs have spent; set before `run`
    best: tuple[str, float] | None  # the objective and its best value


class _Stopped(BaseException):
    """A trial was asked to stop, and so is the sweep. No Exception: Hydra's launcher would go on to the next trial."""


class _Told:
    """True once SIGINT, SIGTERM or SIGHUP came, whoever handles them: a launcher that has to kill its ranks reports
    lost ranks, not a request.
    """

    def __enter__(self) -> Self:
        self._heard, self._waker = socket.socketpair()
        self._heard.setblocking(False)
        self._waker.setblocking(False)
        self._numbers: set[int] = set()
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._main:
            signal.set_wakeup_fd(self._before)
        self._heard.close()
        self._waker.close()

    def __bool__(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._numbers |= set(self._heard.recv(4096))
        return bool(self._numbers & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class _TrialLoader(Loader):
    """Composes each trial of Hydra's as a single run is composed."""

    def __init__(self, composer: Composer) -> None:
        super().__init__(composer.loader.get_search_path())
        self._composer = composer
        self.reads: dict[str, Read] = {}  # of the latest trial

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        config, self.reads = self._composer.load(overrides)
        return config


def sweep(composer: Composer, overrides: Sequence[str], run: Callable[[Callable[[], int]], int]) -> int:
    """Check every trial, then run those that are not finished. `run` calls, reports what is raised and returns an exit
    code.

    The exit code: that of the trial which stopped the sweep, else the first that is not 0. ConfigError before the first
    trial starts when one of them cannot be composed.
    """
    parsed = parse(overrides, composer.loader)
    shared = {
        _typed(f"{each.get_key_element()}={each.get_value_element_as_str()}")
        for each in parsed
        if not each.is_sweep_override()
    }
    planned, complete = _combinations(parsed)
    of = f" of {len(planned)}" if complete and len(planned) > 1 else ""
    composed = [
        _composed(composer, trial, f"trial {number}{of} ({_title(trial, shared)}): " if of else "")
        for number, trial in enumerate(planned, 1)
    ]
    first = composed[0]
    for each in composed:
        _check_trial(first, each)
    home = (
        _home([str(each.input_line) for each in parsed if each.is_sweep_override()], composed)
        if isinstance(first.job, Kept)
        else None
    )
    loader = _TrialLoader(composer)
    done: list[Trial] = []
    stopped = 0

    def start(config: DictConfig) -> float:
        nonlocal stopped
        hydra = HydraConfig.get()
        task = [str(text) for text in hydra.overrides.task]
        trial = Trial(title=_title(task, shared))
        done.append(trial)
        print(f"dtf: trial {len(done)}{of}: {trial.title}", flush=True)

        def finish() -> int:
            OmegaConf.set_struct(config, False)
            OmegaConf.set_readonly(config, False)
            config.hydra = hydra
            composed = composer.finish(config, [*hydra.overrides.hydra, *task], loader.reads)
            _check_trial(first, composed)
            return _run(composed, trial, home / folder_name(_apart(task, shared)) if home else None)

        trial.code = run(finish)
        if trial.code in _ENDS or told:
            stopped = trial.code or Exit.PREEMPTED
            raise _Stopped
        return trial.code if home is None else trial.best[1] if trial.code == Exit.OK and trial.best else math.nan

    with tempfile.TemporaryDirectory(prefix="dtf-sweep-") as scratch, _Locked(home), _Told() as told:
        # Hydra insists on a folder for its copy of the config
        own = [] if first.tree.hydra.sweep.dir else [f"hydra.sweep.dir={scratch}"]
        # Hydra's own multirun composes without the options swept over, so that keys which only those have would be
        # unknown.
        config, _ = composer.load([*planned[0], *own])
        arguments = [each for each in parsed if not each.is_hydra_override()]
        config.hydra.overrides.task = [str(each.input_line) for each in arguments]
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        try:
            composer.with_plugins(overrides, lambda: _drive(config, context, start, arguments, first, home))
        except _Stopped:
            print("dtf: the sweep stops here", file=sys.stderr)
    if complete:
        done += [Trial(title=_title(trial, shared), code=NOT_STARTED) for trial in planned[len(done) :]]
    for line in table(done):
        print(line)
    if home:
        print(_total(done, first, home))
    failed = [f"{trial.title} ({trial.outcome})" for trial in done if trial.code > 0 and trial.code not in _ENDS]
    if failed:
        print(
            f"dtf: {len(failed)} of {len(done)} trials failed: {', '.join(failed)}; the same sweep started again runs "
            "them once more",
            file=sys.stderr,
        )
    return stopped or next((trial.code for trial in done if trial.code > 0), 0)


def _drive(
    config: DictConfig,
    context: HydraContext,
    start: Callable[[DictConfig], float],
    arguments: list[Override],
    first: Composed,
    home: Path | None,
) -> None:
    """Let the chosen sweeper launch trials. Optuna's is ours, any other a plugin of Hydra."""
    plugins = Plugins.instance()
    if first.tree.hydra.runtime.choices.get("hydra/sweeper") != OPTUNA:
        plugins.instantiate_sweeper(config=config, hydra_context=context, task_function=start).sweep(
            [str(each.input_line) for each in arguments]
        )
        return
    if home is None or first.settings.train.eval_every == 0:
        raise ConfigError(
            f"hydra/sweeper={OPTUNA} needs an objective: a job that trains, with evaluations (train.eval_every)"
        )
    options = OptunaOptions(**OmegaConf.to_container(config.hydra.sweeper))  # type: ignore[arg-type]
    launcher = plugins.instantiate_launcher(config=config, hydra_context=context, task_function=start)

    def launch(overrides: Sequence[str], number: int) -> float:
        return launcher.launch([list(overrides)], initial_job_idx=number)[0].return_value  # type: ignore[return-value]

    Tuner(options, arguments, _objective(first)[1], home).run(launch)


def _run(composed: Composed, trial: Trial, folder: Path | None) -> int:
    job = composed.job
    if folder is None or not isinstance(job, Kept):
        return job.run(composed)
    trial.folder = folder
    record = finished(folder, composed.config)
    if record is not None:
        trial.before, trial.best = (
            True,
            (str(record["best"][0]), float(record["best"][1])) if record.get("best") else None,
        )
        print("dtf: it was finished before", flush=True)
        return Exit.OK
    job.folder, job.elsewhere_s = folder, seconds(folder.parent, but=folder)
    try:
        return job.run(composed)
    finally:
        trial.best = job.best


class _Locked:
    """A sweep's folder, made and kept to this process; nothing without one."""

    def __init__(self, home: Path | None) -> None:
        self._home = home

    def __enter__(self) -> None:
        if self._home is None:
            return
        try:
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (self._home / "run.json").exists():
                raise BusyError(
                    f"{self._home} is the folder of one run, a sweep needs one of its own; choose another run.dir"
                )
            self._lock = take_lock(self._home)
        except OSError as error:
            raise ConfigError(
                f"the sweep's folder {self._home} cannot be used: {error.strerror}; choose another run.dir"
            ) from error

    def __exit__(self, *exception: object) -> None:
        if self._home is not None:
            os.close(self._lock)


def _home(swept: list[str], composed: Sequence[Composed]) -> Path:
    """The folder of the sweep: the one that was asked for, or one that the same sweep finds again."""
    config = composed[0].config
    options = OmegaConf.to_container(composed[0].tree.hydra.sweeper)
    assert isinstance(options, dict)
    options.pop("n_trials", None)  # more trials go on
    same = digest([*swept, str(sorted(options.items(), key=str))], [each.config for each in composed])
    return Path(
        config["run"]["dir"] or Path("outputs", config["run"]["name"] or config["recipe"]["name"], f"sweep-{same}")
    ).absolute()


def _check_trial(first: Composed, other: Composed) -> None:
    """Refuse ranks that cannot be started again, and trials that do not agree on what names or bounds the whole
    sweep.
    """
    if not isinstance(other.job, Kept):
        return
    if not other.settings.launcher.starts_ranks:
        name = other.config["launcher"]["name"]
        raise ConfigError(
            f"launcher={name} takes part as a rank that others started, for one run; a sweep starts its own ranks: "
            "use launcher=local"
        )
    for group, names in (("run", ("dir", "name")), ("budget", tuple(first.config["budget"]))):
        for name in names:
            here, there = first.config[group][name], other.config[group][name]
            if here != there:
                raise ConfigError(
                    f"{group}.{name}={show(there)} is {show(here)} in another trial; {group}.{name} belongs to the "
                    "whole sweep, give one value"
                )


def _objective(composed: Composed) -> tuple[str, str]:
    """The metric that says how good a trial is, and `max` or `min`."""
    settings = composed.settings
    name = settings.run.objective or settings.recipe.objective[0]
    return name, settings.recipe.direction(name)


def _total(done: Sequence[Trial], first: Composed, home: Path) -> str:
    """The last line: how many, which is best, what it took, where it is."""
    parts = [f"{sum(trial.code == Exit.OK for trial in done)} of {len(done)} trials finished"]
    number = best_of(done, _objective(first)[1])
    if number is not None:
        parts.append(f"the best is trial {number}")
    spent, price = seconds(home), first.settings.budget.cost_per_hour
    parts.append(f"{time_text(spent)} in all" + (f" at a cost of {spent / 3600 * price:.3g}" if price else ""))
    return f"dtf: {', '.join(parts)}, in {shorten(home)}"


def _composed(composer: Composer, overrides: list[str], name: str) -> Composed:
    try:
        return composer.compose(overrides)
    except ConfigError as error:
        raise ConfigError(f"{name}{error}") from error


def _combinations(overrides: Sequence[Override]) -> tuple[list[list[str]], bool]:
    """The overrides of each trial, and whether these are all: where a sweeper chooses values as it goes, one possible
    trial.
    """
    for each in overrides:
        if each.is_sweep_override() and each.is_hydra_override():
            raise ConfigError(
                f"{show(each.input_line)} sweeps over a setting of Hydra; give it one value; set {COMMAND_LINE}"
            )
    fixed = [each for each in overrides if not each.is_sweep_override() or each.is_discrete_sweep()]
    ends = [
        f"{each.get_key_element()}={value.start}"
        for each in overrides
        if isinstance(value := each.value(), IntervalSweep)
    ]
    trials: list[list[Any]] = BasicSweeper.split_arguments(fixed, max_batch_size=None)[0]
    usual = len(fixed) == len(overrides) and not any(
        each.key_or_group.startswith("hydra/sweeper") for each in overrides
    )
    return [[_typed(text) for text in [*trial, *ends]] for trial in (trials if usual else trials[:1])], usual


def _typed(override: str) -> str:
    """An override as a person types it: Hydra's sweeper writes `~key` as `~key=null`."""
    return override.removesuffix("=null") if override.startswith("~") else override


def _apart(overrides: Sequence[str], shared: set[str]) -> list[str]:
    """The overrides that set a trial apart. A `+` says nothing: composing adds some of its own."""
    plain = {text.lstrip("+") for text in shared}
    return [text for text in (_typed(override).lstrip("+") for override in overrides) if text not in plain]


def _title(overrides: Sequence[str], shared: set[str]) -> str:
    """What sets a trial apart; all of it where nothing does."""
    return (
        " ".join(_apart(overrides, shared))
        or " ".join(_typed(text).lstrip("+") for text in overrides)
        or "(no overrides)"
    )
