"""When to start ranks again and when to give up. A policy; knows nothing of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from dtf.core.errors import Exit
from dtf.core.types import Event, Failed, Note
from dtf.launch.exit_cause import GroupResult

NO_PROGRESS = 3
"""Restarts in a row without a new checkpoint that end a run."""


class Group(Protocol):
    """What is restarted, see `worker_group.WorkerGroup`."""

    saved: bool  # a checkpoint was written
    resumed: bool  # it started from a checkpoint

    def run(self) -> GroupResult: ...


def run_with_restarts(
    start: Callable[[int], Group], max_restarts: int, stopped: Callable[[], bool], see: Callable[[Event], None]
) -> GroupResult:
    """Run the groups that `start(0)`, `start(1)`, ... make, until one ends well or for good, or restarts are used up.

    Returns the result of the last. `stopped`: whether this process was asked to stop; then nothing is restarted.

    A lost process is replaced, and so is one whose machine computes wrongly. A failure of the program (E_BUG) is tried
    again only from a checkpoint, and only once: without one, or after the same message again, it would repeat itself.
    Everything else (a wrong config, bad data, divergence, a full disk) is final.
    """
    number = restarts = 0
    previous: Failed | None = None
    while True:
        group = start(number)
        result = group.run()
        cause = result.cause
        if group.saved:
            restarts = 0
        if cause is None or stopped() or not _may_help(result, group.saved or group.resumed, previous):
            return result
        if restarts >= max_restarts:
            return _given_up(result, cause, restarts)
        restarts += 1
        number += 1
        previous = cause
        who = "" if cause.rank is None else f"rank {cause.rank} "
        text = f"{who}at step {cause.step}: {cause.message}; restart {restarts} of {max_restarts}"
        see(Note("warning", text))


def _may_help(result: GroupResult, checkpoint: bool, previous: Failed | None) -> bool:
    if result.external:
        return True
    repeated = previous is not None and result.cause is not None and previous.message == result.cause.message
    return result.exit is Exit.BUG and checkpoint and not repeated


def _given_up(result: GroupResult, cause: Failed, restarts: int) -> GroupResult:
    if result.exit is Exit.HARDWARE:  # the message says from which checkpoint the next start goes on
        used_up = f"launcher.max_restarts={restarts} is used up; " if restarts else ""
        without = "" if cause.rank is None else ", without that machine"
        exit, why = result.exit, f"{used_up}start again with the same run.dir{without}"
    elif not restarts:
        return result
    elif restarts == NO_PROGRESS:
        exit, why = (
            Exit.NO_PROGRESS,
            f"{restarts} restarts without a new checkpoint; find the cause, or save more often "
            "(checkpoint.every_steps)",
        )
    else:
        exit, why = (
            result.exit,
            f"launcher.max_restarts={restarts} is used up; start again with the same run.dir to go on from the last "
            "checkpoint",
        )
    return GroupResult(exit, replace(cause, exit=int(exit), message=f"{cause.message}; {why}"))
