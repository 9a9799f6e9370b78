"""`hydra/sweeper=optuna`: Optuna proposes the values of each trial from the objectives of the earlier ones. Imports
Optuna only when a search starts.

A proposal depends only on what was known of other trials when it was made. Both are saved before its trial starts. So a
sweep that was killed continues with the same proposals, and why they were made can be told.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from dtf.config.hydra_sources import OptunaOptions
from dtf.core.errors import BusyError, ConfigError
from dtf.core.files import replace_text, small_json

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_FILE = "proposals.json"
_MOST_BYTES = 1 << 26  # some hundred for each trial
_LARGEST_SEED = 2**32 - 1  # of numpy's generators
_DIGITS = 4  # of a number that is drawn: more would make long names of folders and no better model


class Told(NamedTuple):
    """What a trial has come to, as Optuna is told. `value`: its best objective; None: it runs.

    `evaluations`: of a trial that waits at a rung, or was pruned there; None: it is finished.
    """

    value: float | None
    evaluations: int | None = None


def told_by(news: Sequence[Mapping[str, Any]]) -> dict[int, Told]:
    """What was known of trials after all these news; null: nothing any more, as the trial has failed."""
    told: dict[str, Any] = {}
    for some in news:
        told |= some
    return {int(number): Told(**one) for number, one in told.items() if one is not None}


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
        self._path = folder / _FILE
        self._proposals, self._news = self._read()

    @property
    def given(self) -> list[list[str]]:
        """The overrides of each trial that was proposed before, as far as `n_trials` asks for them."""
        return [self._overrides(chosen) for chosen in self._proposals[: self._options.n_trials]]

    def propose(self, known: Mapping[int, Told]) -> list[str] | None:
        """The overrides of one more trial; None when there are `n_trials`. `known`: by number, from 0, what others have
        come to. One that failed teaches nothing and is left out.
        """
        if len(self._proposals) >= self._options.n_trials:
            return None
        before, known = told_by(self._news), dict(sorted(known.items()))
        self._proposals.append(self._proposed(known))
        changed = {
            number: told for number in before.keys() | known.keys() if (told := known.get(number)) != before.get(number)
        }
        self._news.append({str(number): told and told._asdict() for number, told in sorted(changed.items())})
        kept = {"space": self._described(), "proposals": self._proposals, "news": self._news}
        replace_text(self._path, json.dumps(kept, indent=2) + "\n")
        return self._overrides(self._proposals[-1])

    def _overrides(self, chosen: dict[str, Any]) -> list[str]:
        return [*self._fixed, *(f"{key}={chosen[key]}" for key in self._space)]

    def _proposed(self, known: Mapping[int, Told]) -> dict[str, Any]:
        """The first third of the trials, ten at most, are drawn at random. Trials that run count as bad (Optuna's
        `constant_liar`), so that proposals differ.
        """
        number = len(self._proposals)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            sampler = self._optuna.samplers.TPESampler(
                n_startup_trials=min(10, self._options.n_trials // 3),
                seed=self._options.seed + number,
                constant_liar=True,
            )
        study = self._optuna.create_study(
            direction={"max": "maximize", "min": "minimize"}[self._direction], sampler=sampler
        )
        study.add_trials([self._trial(self._proposals[other], told) for other, told in known.items()])
        return {key: self._rounded(key, value) for key, value in study.ask(self._space).params.items()}

    def _trial(self, chosen: dict[str, Any], told: Told) -> Any:
        states, steps = self._optuna.trial.TrialState, {}
        state = states.RUNNING if told.value is None else states.COMPLETE
        if told.evaluations is not None:
            state, steps = states.PRUNED, {told.evaluations: told.value}
        return self._optuna.trial.create_trial(
            state=state, params=chosen, distributions=self._space, value=told.value, intermediate_values=steps
        )

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

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The proposals, and what was told before each that had not been told before: earlier versions did not say
        that.
        """
        try:
            kept = small_json(self._path, _MOST_BYTES)
            space, proposals = dict(kept["space"]), list(kept["proposals"])
            news = list(kept.get("news", [{} for _ in proposals]))
            told_by(news)
            same = space == self._described()
            for chosen in proposals if same else []:
                self._optuna.trial.create_trial(params=chosen, distributions=self._space, value=0.0)  # as `run` will
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BusyError(
                f"{self._path} cannot be read ({type(error).__name__}: {error}); remove it, or choose another run.dir"
            ) from error
        if not same:
            raise BusyError(f"{self._path} holds a search over other values; choose another run.dir")
        return proposals, news
