"""Whether a recipe's metrics are what the contract says, found by a few rows before the first step."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor

from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.core.text import count_text, suggest
from dtf.core.types import Batch, Evaluated

TRIAL_ROWS = 4
"""Rows of a trial evaluation, at most."""


def check_names(recipe: Recipe) -> None:
    """Raise ConfigError unless `train_metrics` and `objective` are of the right types."""
    who, names, objective = type(recipe).__name__, recipe.train_metrics, recipe.objective
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{who}.train_metrics is {names!r}; it must be a tuple of names, such as ('loss', 'top1')")
    pair = isinstance(objective, tuple | list) and len(objective) == 2 and isinstance(objective[0], str)
    if not pair or objective[1] not in ("min", "max"):
        raise ConfigError(
            f"{who}.objective is {objective!r}; it must be the name of a metric and 'min' or 'max', such as "
            "('loss', 'min')"
        )


def check_sums(recipe: Recipe, sums: Any) -> None:
    """Raise ConfigError unless these are metric sums (M,) as `Recipe.measure` must return them."""
    count, who = len(recipe.train_metrics), f"{type(recipe).__name__}.measure()"
    names = ", ".join(("weights", *recipe.train_metrics))
    wanted = f"it must return {count_text(1 + count, 'sum')} ({names}), as dtf.weighted_sums(batch.weight, ...) does"
    if not isinstance(sums, Tensor):
        raise ConfigError(f"{who} returned {type(sums).__name__}; {wanted}")
    if sums.shape != (1 + count,):
        raise ConfigError(f"{who} returned shape {tuple(sums.shape)}; {wanted}")
    if not sums.dtype.is_floating_point:
        raise ConfigError(f"{who} returned {sums.dtype} numbers; {wanted}")


def check_rows(recipe: Recipe, rows: Any, batch: Batch) -> None:
    """Raise ConfigError unless this is what `Recipe.eval_outputs` must return for a micro-batch."""
    who, count = f"{type(recipe).__name__}.eval_outputs()", len(batch.ids)
    if rows is not None and not isinstance(rows, Tensor):
        raise ConfigError(
            f"{who} returned {type(rows).__name__}; it must return a tensor with a row for each row, or None"
        )
    if rows is not None and (rows.dim() != 2 or len(rows) != count):
        raise ConfigError(
            f"{who} returned shape {tuple(rows.shape)} for {count_text(count, 'row')}; it must return ({count}, K): K "
            "numbers for each row"
        )


def check_evaluated(recipe: Recipe, evaluated: Evaluated | None, batch: Batch | None, objective: str) -> None:
    """Raise ConfigError where metrics cannot be made of a trial evaluation of `batch`, or the objective is not among
    them. `evaluated`: None or zeros on a rank that owns no outputs, which finds nothing.
    """
    if evaluated is None or batch is None:
        return
    sums, who = evaluated.sums.tolist(), type(recipe).__name__
    if not sums[0]:
        return
    rows, weight = len(batch.ids), float(batch.weight.sum())  # rows that cannot be read weigh nothing
    if sums[0] != weight:
        raise ConfigError(
            f"{who}.measure() gives {sums[0]:g} as the first sum of {count_text(rows, 'row')}; it must be the sum of "
            "batch.weight, as of dtf.weighted_sums(batch.weight, ...)"
        )
    try:
        values: Any = recipe.summarise(sums)
    except (ArithmeticError, ValueError):
        return  # so few rows need not have every metric
    if not isinstance(values, dict) or not all(isinstance(value, numbers.Real) for value in values.values()):
        raise ConfigError(f"{who}.summarise() returned {values!r}; it must return a dict: name of a metric -> number")
    evaluator = recipe.evaluator(rows)
    if evaluator is not None:
        if evaluated.rows is None:
            raise ConfigError(f"{who} has an evaluator(), but eval_outputs() returned None, so it would see no rows")
        try:
            evaluator.add(evaluated.rows)
            more = evaluator.values(_Alone())
        except Exception:  # noqa: BLE001  so few rows, perhaps of one class, need not have a value
            return
        values = values | more
    if objective not in values:
        raise ConfigError(f"the objective {objective} is no metric of the recipe; {suggest(objective, values)}")


class _Alone:
    """One rank as the peers of an evaluator."""

    def reduce(self, sums: Tensor) -> Tensor:
        return sums

    def collect(self, rows: Tensor) -> Tensor | None:
        return rows

    def broadcast(self, value: Any) -> Any:
        return value
