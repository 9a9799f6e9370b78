"""When to start ranks again and when to give up. A policy over attempts; knows nothing of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dtf.core.errors import Exit
from dtf.core.types import Event, Failed, Note
from dtf.launch.exit_cause import Outcome

NO_PROGRESS = 3
"""Restarts in a row without a new checkpoint that end a run."""


class Attempt(Protocol):
    """One set of ranks, started and watched to its end."""

    saved: bool  # a checkpoint was written
    resumed: bool  # it started from a checkpoint

    def run(self) -> Outcome: ...


def supervise(
    attempt: Callable[[int], Attempt], max_restarts: int, stopped: Callable[[], bool], see: Callable[[Event], None]
) -> Outcome:
    """Run `attempt(0)`, `attempt(1)`, ... until one ends well, fails for good, or restarts are used up; the outcome of
    the run.

    A lost process is replaced. A failure of the program (E_BUG) is tried again only from a checkpoint, and only once:
    without one, or after the same words again, it would repeat itself. Everything else (a wrong config, bad data,
    divergence, a full disk) is final.
    """
    number = restarts = 0
    previous: Failed | None = None
    while True:
        current = attempt(number)
        outcome = current.run()
        cause = outcome.cause
        if current.saved:
            restarts = 0
        if cause is None or stopped() or not _may_help(outcome, current.saved or current.resumed, previous):
            return outcome
        if restarts >= max_restarts:
            return _given_up(outcome, cause, restarts)
        restarts += 1
        number += 1
        previous = cause
        see(
            Note(
                "warning",
                f"rank {cause.rank} at step {cause.step}: {cause.message}; restart {restarts} of {max_restarts}",
            )
        )


def _may_help(outcome: Outcome, checkpoint: bool, previous: Failed | None) -> bool:
    if outcome.external:
        return True
    repeated = previous is not None and outcome.cause is not None and previous.message == outcome.cause.message
    return outcome.exit is Exit.BUG and checkpoint and not repeated


def _given_up(outcome: Outcome, cause: Failed, restarts: int) -> Outcome:
    if not restarts:
        return outcome
    if restarts == NO_PROGRESS:
        exit, why = (
            Exit.NO_PROGRESS,
            f"{restarts} restarts without a new checkpoint; find the cause, or save more often "
            "(checkpoint.every_steps)",
        )
    else:
        exit, why = (
            outcome.exit,
            f"launcher.max_restarts={restarts} is used up; start again with the same run.dir to go on from the last "
            "checkpoint",
        )
    return Outcome(exit, Failed(cause.rank, cause.step, int(exit), f"{cause.message}; {why}", cause.traceback))
