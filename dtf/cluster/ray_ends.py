"""What the ends of a job's processes on Ray mean for its run: finished, failed, or placed again. Pure."""

from __future__ import annotations

from typing import Any

from dtf.cluster.after_exit import WHILE_PROGRESS, After, after


def verdict(codes: list[int | None], deciding: int) -> int | None:
    """The one exit code of an attempt from those of its processes; None where one was lost without any.

    `deciding`: so many from the first on decide whether the run is finished, as servers do for their trainers.
    """
    if all(code == 0 for code in codes[:deciding]):
        return 0
    failed = [code for code in codes if after(code) is After.failed]
    if failed:
        return failed[0]
    lost = [code for code in codes if after(code) is After.lost]
    if any(code not in WHILE_PROGRESS for code in lost):
        return None  # killed from outside, as by the kernel for its memory; what the others say follows from it
    return lost[0] if lost else next(code for code in codes if code)


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
