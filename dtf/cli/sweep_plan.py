"""What a sweep is to do: its trials, each composed, its folder, and what is refused before the first one starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from dtf.api.lr import steps_of_rise
from dtf.api.options import Prune, SweepOptions
from dtf.api.schema import build, show
from dtf.cli.run_trial import JobWithFolder
from dtf.cli.schedule import Rules, as_trial
from dtf.cli.slots import SIDE_BY_SIDE, share_of_cores, share_of_devices
from dtf.cli.submitted_sweep import check_job, platform_of
from dtf.cli.sweep_overrides import as_typed, combinations, distinct, title_of
from dtf.cli.trials import Trial, digest, folder_name, left_alone
from dtf.config.hydra_sources import BASIC_SWEEPER, OPTUNA, OptunaOptions
from dtf.config.messages import parse
from dtf.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from dtf.cluster.platform import Platform
    from dtf.config.compose import Composed, Composer


@dataclass(frozen=True)
class SweepPlan:
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
        return Rules(self.options, objective, known, of_all, self._title_of, self._folder_of, self._rise)

    def _rise(self, total: int) -> int:
        """Steps of a run of `total` until the learning rate has stopped to rise in all trials that are known."""
        return max(steps_of_rise(one.settings.lr, total) for one in self.composed)

    def with_those_not_started(self, begun: Mapping[int, Trial]) -> list[Trial]:
        """Trials for the table, by number: where a sweep was stopped, it did not come to some."""
        trials = dict(begun)
        for number, (words, one) in enumerate(zip(self.trials, self.composed, strict=True) if self.complete else (), 1):
            if number not in trials:
                folder = self._folder_of(words)
                trials[number] = left_alone(self._title_of(words), folder, as_trial(one, folder).config)
        return [trial for _, trial in sorted(trials.items())]

    def _title_of(self, overrides: Sequence[str]) -> str:
        return title_of(_without_hydra(overrides), self.shared)

    def _folder_of(self, overrides: Sequence[str]) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / folder_name(distinct(_without_hydra(overrides), self.shared))


def _without_hydra(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.startswith(("hydra.", "hydra/"))]


def make_plan(composer: Composer, overrides: Sequence[str]) -> SweepPlan:
    """The trials of a sweep. ConfigError for one that cannot be composed, or does not agree with the first."""
    parsed = parse(overrides, composer.loader)
    swept = [override for override in parsed if override.is_sweep_override()]
    fixed = [override for override in parsed if not override.is_sweep_override()]
    shared = {as_typed(f"{override.get_key_element()}={override.get_value_element_as_str()}") for override in fixed}
    trials, complete = combinations(parsed)
    named = [
        f"trial {number} of {len(trials)} ({title_of(trial, shared)}): " if complete and len(trials) > 1 else ""
        for number, trial in enumerate(trials, 1)
    ]
    composed: list[Composed] = []
    for name, trial in zip(named, trials, strict=True):
        with _named(name):
            composed.append(composer.compose(trial))
    first = composed[0]
    for name, one in zip(named, composed, strict=True):
        with _named(name):
            check_trial(first, one)
            if complete:
                _check_parts(one)
    is_kept = isinstance(first.job, JobWithFolder)
    folder = _sweep_folder([str(override.input_line) for override in swept], composed) if is_kept else None
    plan = SweepPlan(overrides, parsed, shared, trials, complete, composed, folder)
    _check_rules(plan, composed)
    return plan


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


def _check_rules(plan: SweepPlan, trials: Sequence[Composed]) -> None:
    """Raise ConfigError for options of the sweep that these trials cannot follow."""
    options, budget = plan.options, plan.first.config["budget"]
    for name in ("hours", "cost") if plan.platform is not None else ():
        if budget[name] is not None:
            raise ConfigError(
                f"budget.{name}={budget[name]:g} is that of all trials of a sweep together, and jobs of a scheduler do "
                "not count each other's seconds; use launcher.hours, the limit of each"
            )
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


def _check_pruning(plan: SweepPlan, given: str, trials: Sequence[Composed]) -> None:
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


def check_trial(first: Composed, other: Composed) -> None:
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
    check_job(first, other)
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


def _check_parts(trial: Composed) -> None:
    """Raise ConfigError for what a trial on this host would be refused for when it begins. What is wrong with its data
    may be another thing by then.
    """
    if platform_of(trial) is None and isinstance(trial.job, JobWithFolder):
        with suppress(DataError):
            settings = as_trial(trial, None).check()
            settings.launcher.check(settings.strategy)


@contextmanager
def _named(trial: str) -> Iterator[None]:
    """A context whose ConfigError names the trial."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{trial}{error}") from error
