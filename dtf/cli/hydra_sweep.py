"""Hydra's part in a sweep: its sweepers say which trials there are, and its loader composes each.

Trials are run by the schedule of a sweep. Sweepers get it in the place of a launcher of Hydra's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dtf.cli.optuna_search import OptunaSearch, Told
from dtf.cli.pruning import Phase
from dtf.cli.schedule import Batch, Schedule, ScheduledTrial
from dtf.config.hydra_internals import Callbacks, launched_by
from dtf.config.hydra_sources import Loader

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from dtf.config.compose import Composed, Composer
    from dtf.config.defaults_lists import YamlFile


class TrialLoader(Loader):
    """Composes each trial as a single run is composed."""

    def __init__(self, composer: Composer, scratch: str) -> None:
        """`scratch`: a folder for the copy of the config that Hydra's own sweeper writes."""
        super().__init__(composer.loader.get_search_path())
        self._composer, self._scratch = composer, scratch
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
            config.hydra.sweep.dir = self._scratch
        return config


class HydraSweep:
    """A sweep as Hydra sees it. `first`: the overrides of one possible trial."""

    def __init__(self, composer: Composer, first: list[str], arguments: Sequence[Override], scratch: str) -> None:
        self._composer, self._loader = composer, TrialLoader(composer, scratch)
        self._words = [str(override.input_line) for override in arguments]
        # Hydra's own multirun composes without the options swept over, so that keys which only those have would be
        # unknown.
        self.config = self._loader.load_configuration(None, first, RunMode.MULTIRUN)
        self.config.hydra.overrides.task = self._words

    def compose(self, number: int, overrides: list[str]) -> Composed:
        """The config of a trial. ConfigError."""
        setup_globals()
        config = self._loader.load_sweep_config(self.config, overrides)
        with open_dict(config.hydra):
            config.hydra.job.id = config.hydra.job.num = number - 1
        given = [*config.hydra.overrides.hydra, *config.hydra.overrides.task]
        OmegaConf.set_struct(config, False)
        OmegaConf.set_readonly(config, False)
        return self._composer.finish(config, [str(text) for text in given], self._loader.reads)

    def run(self, schedule: Schedule) -> None:
        """Let the sweeper that the config chooses have its trials run."""
        context = HydraContext(config_loader=self._loader, callbacks=Callbacks())
        launcher = _Batches(schedule)
        with launched_by(launcher):
            sweeper = Plugins.instance().instantiate_sweeper(
                config=self.config, hydra_context=context, task_function=lambda config: None
            )
            sweeper.sweep(self._words)


class _Batches(Launcher):
    """Runs the batches of a sweeper of Hydra, each in a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def setup(self, *, hydra_context: HydraContext, task_function: Callable, config: DictConfig) -> None:
        """Nothing of it is needed."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        first = initial_job_idx + 1
        self._schedule.run(Batch(job_overrides, first))
        return [self._returned(number, words) for number, words in enumerate(job_overrides, first)]

    def _returned(self, number: int, overrides: Sequence[str]) -> JobReturn:
        returned = JobReturn(overrides=overrides, task_name="dtf", working_dir=str(Path.cwd()))
        composed = self._schedule.trials[number].composed
        if composed is not None:
            tree = deepcopy(composed.tree)
            returned.hydra_cfg = OmegaConf.create({"hydra": tree.hydra})
            with read_write(tree), open_dict(tree):
                del tree["hydra"]
            returned.cfg = tree
        returned.status, returned.return_value = JobStatus.COMPLETED, self._schedule.value_of(number)
        return returned


class OptunaTrials:
    """The trials that Optuna chooses, each when there is a place for it."""

    def __init__(self, search: OptunaSearch) -> None:
        self._search = search
        self.given = list(enumerate(search.given, 1))

    def more(self, trials: Mapping[int, ScheduledTrial]) -> tuple[int, list[str]] | None:
        known = {number - 1: told for number, trial in trials.items() if (told := self._told(trial)) is not None}
        overrides = self._search.propose(known)
        return None if overrides is None else (len(trials) + 1, overrides)

    def _told(self, trial: ScheduledTrial) -> Told | None:
        if trial.phase in (Phase.running, Phase.cut):
            return Told(None)
        if trial.phase is Phase.failed or trial.shown.best is None:
            return None
        waits = trial.phase in (Phase.waiting, Phase.pruned)
        return Told(trial.shown.best[1], len(trial.standing.values) if waits else None)
