"""`-m`: one run per combination of values. Hydra's sweeper and launcher decide which and when; each trial starts fresh ranks.

This process stays without torch, so any number of trials may follow each other in it.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from dtf.errors import ConfigError, Exit, code_name
from dtf.explain import COMMAND_LINE, parse, shorten
from dtf.schema import show
from dtf.sources import Loader, Read
from dtf.tracking import number_text

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from dtf.config import Composed, Composer

COLUMNS = 100
"""Width that the summary keeps to, but for words that are longer."""


@runtime_checkable
class Kept(Protocol):
    """A job that says where its run is kept and how good it became; other jobs have an exit code only."""

    folder: Path | None
    best: tuple[str, float] | None  # the objective and its best value


@dataclass(kw_only=True)
class Trial:
    """One run of a sweep, as its summary shows it."""

    title: str  # the overrides that make it differ from the others
    code: int = Exit.BUG
    folder: Path | None = None
    best: tuple[str, float] | None = None


class _Stopped(BaseException):
    """A trial was asked to stop, and so is the sweep. No Exception: Hydra's launcher would go on to the next trial."""


class _TrialLoader(Loader):
    """Composes each trial of Hydra's as a single run is composed."""

    def __init__(self, composer: Composer) -> None:
        super().__init__(composer.loader.get_search_path())
        self._composer = composer
        self.reads: dict[str, Read] = {}  # of the latest trial

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, from_shell: bool = True, validate_sweep_overrides: bool = True
    ) -> DictConfig:
        config, self.reads = self._composer.load(overrides)
        return config


def sweep(composer: Composer, overrides: Sequence[str], run: Callable[[Callable[[], int]], int]) -> int:
    """Check every trial, then run them; the first exit code that is not 0. `run` calls, reports what is raised and returns an exit code.

    ConfigError before the first trial starts when one of them cannot be composed.
    """
    parsed = parse(overrides, composer.loader)
    shared = {_typed(f"{each.get_key_element()}={each.get_value_element_as_str()}") for each in parsed if not each.is_sweep_override()}
    planned = _combinations(parsed)
    of = f" of {len(planned)}" if len(planned) > 1 else ""
    first, *_ = [_composed(composer, trial, f"trial {number}{of} ({_title(trial, shared)}): " if of else "") for number, trial in enumerate(planned, 1)]
    loader = _TrialLoader(composer)
    done: list[Trial] = []

    def start(config: DictConfig) -> int:
        hydra = HydraConfig.get()
        task = [str(text) for text in hydra.overrides.task]
        trial = Trial(title=_title(task, shared))
        print(f"dtf: trial {len(done) + 1}{of}: {trial.title}", flush=True)
        done.append(trial)

        def finish() -> int:
            OmegaConf.set_struct(config, False)
            OmegaConf.set_readonly(config, False)
            config.hydra = hydra
            return _run(composer.finish(config, [*hydra.overrides.hydra, *task], loader.reads), trial)

        trial.code = run(finish)
        if trial.code == Exit.PREEMPTED:
            raise _Stopped
        return trial.code

    with tempfile.TemporaryDirectory(prefix="dtf-sweep-") as scratch:
        own = [] if first.tree.hydra.sweep.dir else [f"hydra.sweep.dir={scratch}"]  # Hydra insists on a folder for its copy of the config
        # Hydra's own multirun composes without the options swept over, so that keys which only those have would be unknown.
        config, _ = composer.load([*planned[0], *own])
        arguments = [str(each.input_line) for each in parsed if not each.is_hydra_override()]
        config.hydra.overrides.task = arguments
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        try:
            composer.with_plugins(
                overrides, lambda: Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=start).sweep(arguments)
            )
        except _Stopped:
            print("dtf: the sweep stops here", file=sys.stderr)
    for line in summary(done):
        print(line)
    return next((trial.code for trial in done if trial.code), 0)


def summary(trials: Sequence[Trial]) -> Iterator[str]:
    """Lines with each trial's outcome, best value, overrides and run folder; the folder on a line of its own where one would be too wide."""
    rows = []
    for number, trial in enumerate(trials, 1):
        outcome = "ok" if trial.code == 0 else code_name(Exit(trial.code)) if trial.code in set(Exit) else f"exit code {trial.code}"
        best = f"{trial.best[0]}={number_text(trial.best[1])}" if trial.best else ""
        rows.append((f"dtf: trial {number}: {outcome}", best, trial.title, shorten(trial.folder) if trial.folder else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    wide = sum(widths) + 2 * (len(widths) - 1) > COLUMNS
    for *cells, folder in rows:
        shown = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False) if width]
        if not wide:
            yield "  ".join([*shown, folder]).rstrip()
            continue
        yield from textwrap.wrap("  ".join(shown), COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        if folder:
            yield f"    {folder}"


def _run(composed: Composed, trial: Trial) -> int:
    job = composed.job
    try:
        return job.run(composed)
    finally:
        if isinstance(job, Kept):
            trial.folder, trial.best = job.folder, job.best


def _composed(composer: Composer, overrides: list[str], name: str) -> Composed:
    try:
        return composer.compose(overrides)
    except ConfigError as error:
        raise ConfigError(f"{name}{error}") from error


def _combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of each trial; of one possible trial only where a sweeper chooses values as it goes."""
    for each in overrides:
        if each.is_sweep_override() and each.is_hydra_override():
            raise ConfigError(f"{show(each.input_line)} sweeps over a setting of Hydra; give it one value; set {COMMAND_LINE}")
    fixed = [each for each in overrides if not each.is_sweep_override() or each.is_discrete_sweep()]
    trials: list[list[Any]] = BasicSweeper.split_arguments(fixed, max_batch_size=None)[0]
    usual = len(fixed) == len(overrides) and not any(each.key_or_group.startswith("hydra/sweeper") for each in overrides)
    return [[_typed(text) for text in trial] for trial in (trials if usual else trials[:1])]


def _typed(override: str) -> str:
    """An override as a person types it: Hydra's sweeper writes `~key` as `~key=null`."""
    return override.removesuffix("=null") if override.startswith("~") else override


def _title(overrides: Sequence[str], shared: set[str]) -> str:
    """What sets a trial apart; all of it where nothing does. A `+` says nothing: composing adds some of its own."""
    plain = {text.lstrip("+") for text in shared}
    typed = [_typed(text).lstrip("+") for text in overrides]
    return " ".join(text for text in typed if text not in plain) or " ".join(typed) or "(no overrides)"
