"""The objective of a run after each evaluation, in its run.json: for sweeps and reports, whatever observers there are.

Reads and changes the record alone; `run_folder.Run` writes the file.
"""

from __future__ import annotations

import math
from typing import Any

from dtf.core.types import Measured, Started

MOST_EVALUATIONS = 4096
"""That a record holds. Of more, every second one is left out."""

_OBJECTIVE, _VALUES, _PLAN, _BEST = "objective", "evaluations", "plan", "best"


def carry(record: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Move the evaluations of an earlier launch into the record of the one that goes on. What no run writes is lost."""
    values = earlier.pop(_VALUES, {})
    if isinstance(values, dict) and all(step.isdecimal() for step in values):
        record |= {_OBJECTIVE: earlier.pop(_OBJECTIVE, ""), _VALUES: values}


def begin(record: dict[str, Any], objective: str, event: Started) -> None:
    """The ranks are ready: note the plan, and forget the evaluations after the step from which they go on, which
    follow again.
    """
    record[_PLAN] = {"steps": event.total, "steps_per_epoch": event.steps_per_epoch}
    before = record.get(_VALUES, {}) if record.get(_OBJECTIVE) == objective else {}
    record[_OBJECTIVE] = objective
    record[_VALUES] = {step: value for step, value in before.items() if int(step) <= event.step}
    for measured in event.recent:
        add(record, measured)


def add(record: dict[str, Any], event: Measured) -> bool:
    """Note the objective of an evaluation; null where it is not finite. Returns whether `event` is one."""
    value = event.values.get(record.get(_OBJECTIVE, ""))
    if event.split != "eval" or value is None:
        return False
    values = record[_VALUES]
    values[str(event.step)] = value if math.isfinite(value) else None
    if len(values) > MOST_EVALUATIONS:
        record[_VALUES] = dict([*values.items()][1::2])
    return True


def evaluations(record: dict[str, Any]) -> dict[int, float]:
    """Step -> objective of a run.json, in order of steps; NaN where it was not finite. Empty in a record of an earlier
    version.
    """
    values = record.get(_VALUES) or {}
    return {
        int(step): math.nan if (value := values[step]) is None else float(value) for step in sorted(values, key=int)
    }


def plan_of(record: dict[str, Any]) -> tuple[int, int] | None:
    """Steps of the whole run and of an epoch, as its ranks found them; None before they were ready."""
    plan = record.get(_PLAN)
    return (int(plan["steps"]), int(plan["steps_per_epoch"])) if plan else None


def best_value(record: dict[str, Any]) -> tuple[str, float] | None:
    """The objective of a run and its best value; None before there is one."""
    best = record.get(_BEST)
    return (str(best[0]), float(best[1])) if best else None


def check(record: dict[str, Any]) -> None:
    """Raise ValueError where a run.json holds here what no run writes: it may come from elsewhere."""
    for key, read in ((_VALUES, evaluations), (_PLAN, plan_of), (_BEST, best_value)):
        try:
            read(record)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ValueError(f"its {key} is of another kind: {type(error).__name__}: {error}") from error
