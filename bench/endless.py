"""A clock for contests: the engine takes turns of some steps with something else, and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtf.api.lr import Constant
from dtf.core.types import Log, Stop, Ticket, Train
from dtf.data.batches import Epochs
from dtf.engine.clock import Clock, Plan, PlannedClock


class Endless(Clock):
    """A plan without end that stops after each turn, and logs before that if it is to.

    `mark` is called before each step and after the last one of a turn, `flush` before a log, so that it has all steps
    of the turn: the engine itself flushes a program at the end of a plan alone.
    """

    def __init__(
        self,
        epochs: Epochs,
        lr: float,
        logs: bool = False,
        mark: Callable[[], None] = lambda: None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner = PlannedClock(Plan(10**9, 0, 0, 0), epochs, Constant(peak=lr))
        self._logs, self._mark, self._flush = logs, mark, flush
        self._step, self._left, self._said = 0, 0, True

    @property
    def objective(self) -> str:
        return self._inner.objective

    def turn(self, steps: int) -> None:
        """Let so many steps follow."""
        self._left, self._said = steps, not self._logs

    def __next__(self) -> Ticket:
        if self._left:
            ticket = next(self._inner)
            if isinstance(ticket, Train):
                self._mark()
                self._left, self._step = self._left - 1, ticket.step + 1
            return ticket
        if self._said:
            return Stop(self._step, "stopped")
        self._said = True
        self._mark()
        self._flush()
        return Log(self._step)

    def ahead(self, count: int) -> list[Train]:
        return self._inner.ahead(count)

    def done(self, ticket: Ticket, values: Any) -> None:
        self._inner.done(ticket, values)

    def state(self) -> dict:
        return self._inner.state()

    @property
    def best(self) -> None:
        return None
