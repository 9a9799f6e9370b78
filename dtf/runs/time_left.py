"""Whether the time that is left of an allocation is worth a start."""

from __future__ import annotations

from datetime import datetime
from itertools import takewhile
from typing import Any

from dtf.core.errors import NoProgressError, OutOfTime
from dtf.core.text import count_text, time_text
from dtf.host.deadline import VARIABLE

TIME_LEFT = "time_left_s"
"""The key of a launch in run.json for the seconds that were left of its allocation when it began."""
MOST_SHORT = 2
"""Launches in a row that had no time for a step, after which another one with as little time is refused."""
_WHOLE = 0.8
"""Of the time that it had, what a launch has taken that its allocation has ended."""


def refuse_short(left_s: float, earlier: list[dict[str, Any]], notice_s: float = 0.0) -> None:
    """Refuse to start where an allocation ends in `left_s` seconds, and no step can be expected before.

    `earlier`: the launches of this run before, as run.json has them. `notice_s`: how long before its end an allocation
    may ask a run to stop. OutOfTime where nothing is left; NoProgressError where the last ones had no less, and made no
    step: a scheduler would start the job for ever.
    """
    short = len(list(takewhile(lambda launch: _was_short(launch, left_s, notice_s), reversed(earlier))))
    if short >= MOST_SHORT:
        had = f"has no more time, {time_text(left_s)}" if left_s > 0 else f"was over {time_text(-left_s)} ago"
        raise NoProgressError(
            f"the last {count_text(short, 'launch')} of this run ended with their allocations before a step was made, "
            f"and this one {had}; give the allocation more time, under launcher=slurm by launcher.hours"
        )
    if left_s <= 0:
        raise OutOfTime(
            f"the time limit of the allocation ({VARIABLE}) was {time_text(-left_s)} ago; nothing is lost; start again "
            "in a new allocation"
        )


def _was_short(launch: dict[str, Any], left_s: float, notice_s: float) -> bool:
    """Whether a launch made no step in its allocation, and had no less time than this one."""
    had_s = launch.get(TIME_LEFT)
    if had_s is None or max(0.0, had_s) * 1.1 < left_s:
        return False
    if launch.get("error") == OutOfTime.__name__:  # whatever it has of a launch before
        return True
    if launch.get("results", True):
        return False
    return _lasted_s(launch) >= min(_WHOLE * had_s, max(0.0, had_s - notice_s))


def _lasted_s(launch: dict[str, Any]) -> float:
    started, ended = launch.get("started"), launch.get("ended")
    if not started or not ended:
        return 0.0
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
