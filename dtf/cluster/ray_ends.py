"""What the ends of a job's processes on Ray mean for its run: finished, failed, or placed again. Pure."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

ALWAYS, WHILE_PROGRESS = (75, 143), (69, 71, 74)
"""Exit codes after which a run is placed again; the second kind only while new checkpoints come."""
BUSY = 73
"""The folder has a live run; after the first placement that can only be one of this job's own."""
_ENDS_WITHOUT_PROGRESS = 3


def verdict(codes: list[int | None], deciding: int) -> int | None:
    """The one exit code of an attempt from those of its processes; None where one was lost without any.

    `deciding`: so many from the first on decide whether the run is finished, as servers do for their trainers.
    """
    if all(code == 0 for code in codes[:deciding]):
        return 0
    ended = [None if code == 137 else code for code in codes]  # killed from outside, as by the kernel for its memory
    known = [code for code in ended if code]
    final = [code for code in known if code not in (*ALWAYS, *WHILE_PROGRESS)]
    if final:
        return final[0]
    if None in ended:
        return None
    return next((code for code in known if code in WHILE_PROGRESS), known[0])


def goes_on(code: int | None, attempt: int, progress: bool, stalled: int) -> tuple[bool, int]:
    """Whether a run is placed again after this end, and how many such ends there were without a new checkpoint.

    `code`: None for a lost process. `attempt`: of the placement, from 1. `progress`: whether there is a new checkpoint
    since the last end. `stalled`: what this returned then.
    """
    if code in ALWAYS:
        return True, 0 if progress else stalled
    if code is None or code in WHILE_PROGRESS or (code == BUSY and attempt > 1):
        stalled = 0 if progress else stalled + 1
        return stalled < _ENDS_WITHOUT_PROGRESS, stalled
    return False, stalled


def newest_checkpoint(run_dir: str) -> str:
    """The name of the newest one; empty where there is none."""
    with contextlib.suppress(OSError):
        names = os.listdir(f"{run_dir}/checkpoints")
        return max((name for name in names if re.fullmatch(r"step_\d+", name)), default="")
    return ""


def joint(states: list[str], cancelled: bool) -> str:
    """Of a job whose runs have all ended."""
    if "failed" in states:
        return "failed"
    return "cancelled" if "cancelled" in states or (not states and cancelled) else "finished"


def live(states: list[str]) -> str:
    """Of a job whose driver is at work."""
    for state in ("running", "requeued"):
        if state in states:
            return state
    return "queued" if "queued" in states else "running"


def counted(runs: dict[str, dict[str, Any]], size: int) -> str:
    states = [run["state"] for run in runs.values()]
    return ", ".join([f"{size} trials", *(f"{states.count(state)} {state}" for state in dict.fromkeys(states))])
