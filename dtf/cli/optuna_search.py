"""`hydra/sweeper=optuna`: Optuna proposes the values of each trial from the objectives of the earlier ones. Imports
Optuna only when a search starts.

A proposal depends only on the trials before it, and is saved before its trial starts. So a sweep that was killed
continues with the same proposals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from dtf.config.hydra_sources import OptunaOptions
from dtf.core.errors import BusyError, ConfigError
from dtf.core.files import replace_text

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_FILE = "proposals.json"
_LARGEST_SEED = 2**32 - 1  # of numpy's generators
_DIGITS = 4  # of a number that is drawn: more would make long names of folders and no better model


class OptunaSearch:
    """A search over the overrides that hold several values. `direction` (`max`, `min`) is that of the objective;
    `folder` keeps the proposals.

    ConfigError for what cannot be searched.
    """

    def __init__(self, options: OptunaOptions, overrides: Sequence[Override], direction: str, folder: Path) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                "hydra/sweeper=optuna needs the package optuna; install it: python -m pip install 'optuna>=4'"
            ) from error
        if options.n_trials < 1:
            raise ConfigError(f"hydra.sweeper.n_trials={options.n_trials} must be 1 or more")
        if not 0 <= options.seed <= _LARGEST_SEED - options.n_trials:  # each trial has its own
            raise ConfigError(f"hydra.sweeper.seed={options.seed} must be 0 to {_LARGEST_SEED - options.n_trials}")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._options, self._direction = optuna, options, direction
        self._space = {
            each.get_key_element(): self._distribution(each) for each in overrides if each.is_sweep_override()
        }
        self._fixed = [
            f"{each.get_key_element()}={each.get_value_element_as_str()}"
            for each in overrides
            if not each.is_sweep_override()
        ]
        if not self._space:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to choose; give a key several values: lr.peak=interval(0.01,1)"
            )
        self._path, self._tried = folder / _FILE, []
        self._proposals = self._read()

    def run(self, launch: Callable[[Sequence[str], int], float]) -> None:
        """Launch every trial: `launch(overrides, number)` returns its objective, NaN when it failed."""
        for number in range(self._options.n_trials):
            if number == len(self._proposals):
                self._proposals.append(self._propose(number))
                replace_text(
                    self._path, json.dumps({"space": self._described(), "proposals": self._proposals}, indent=2) + "\n"
                )
            chosen = self._proposals[number]
            value = launch([*self._fixed, *(f"{key}={chosen[key]}" for key in self._space)], number)
            if math.isfinite(value):
                self._tried.append(
                    self._optuna.trial.create_trial(params=chosen, distributions=self._space, value=value)
                )

    def _propose(self, number: int) -> dict[str, Any]:
        """The first third of the trials, ten at most, are drawn at random."""
        sampler = self._optuna.samplers.TPESampler(
            n_startup_trials=min(10, self._options.n_trials // 3), seed=self._options.seed + number
        )
        study = self._optuna.create_study(
            direction={"max": "maximize", "min": "minimize"}[self._direction], sampler=sampler
        )
        study.add_trials(self._tried)
        return {key: self._rounded(key, value) for key, value in study.ask(self._space).params.items()}

    def _rounded(self, key: str, value: Any) -> Any:
        space = self._space[key]
        return min(max(float(f"{value:.{_DIGITS}g}"), space.low), space.high) if isinstance(value, float) else value

    def _distribution(self, override: Override) -> Any:
        known, value = self._optuna.distributions, override.value()
        if isinstance(value, IntervalSweep):
            low, high, log = value.start, value.end, "log" in value.tags
            if low is None or high is None or not low < high or (log and low <= 0):
                raise ConfigError(
                    f"{override.input_line} is no interval to search; the first number must be the smaller one, and "
                    "above 0 with tag(log, ...)"
                )
            whole = isinstance(low, int) and isinstance(high, int)
            return (
                known.IntDistribution(low, high, log=log)
                if whole
                else known.FloatDistribution(float(low), float(high), log=log)
            )
        if (
            isinstance(value, RangeSweep)
            and not value.shuffle
            and all(isinstance(end, int) for end in (value.start, value.stop, value.step))
        ):
            numbers = range(int(value.start or 0), int(value.stop or 0), int(value.step))
            if numbers and numbers.step > 0:
                return known.IntDistribution(numbers[0], numbers[-1], step=numbers.step)
        return known.CategoricalDistribution(list(override.sweep_string_iterator()))

    def _described(self) -> dict[str, Any]:
        return {
            key: json.loads(self._optuna.distributions.distribution_to_json(space))
            for key, space in self._space.items()
        }

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        try:
            kept = json.loads(self._path.read_text())
            space, proposals = dict(kept["space"]), list(kept["proposals"])
            same = space == self._described()
            for chosen in proposals if same else []:
                self._optuna.trial.create_trial(params=chosen, distributions=self._space, value=0.0)  # as `run` will
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BusyError(
                f"{self._path} cannot be read ({type(error).__name__}: {error}); remove it, or choose another run.dir"
            ) from error
        if not same:
            raise BusyError(f"{self._path} holds a search over other values; choose another run.dir")
        return proposals
