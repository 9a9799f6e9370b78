"""Guarded steps of a run, see `train.guard_every`: which they are, and where the run goes back to when one finds
replicas that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dtf.api.guard import Guard
from dtf.api.strategy import Program
from dtf.core.errors import ConfigError, CorruptionError
from dtf.core.types import Batch, StepOutput, Train


class Suspects(Protocol):
    """What a guard asks of who keeps the checkpoints, see `Checkpointer`."""

    def trust(self, step: int) -> None: ...
    def set_aside(self, after: int) -> tuple[list[str], str]: ...


class GuardedSteps:
    """Every step whose number `every` divides. `start`: the last step without a difference as far as the checkpoint
    says from which the run goes on. `saver`: None: nothing is saved. `see`: told what a person should know.
    """

    def __init__(
        self, guard: Guard, every: int, start: int, saver: Suspects | None, see: Callable[[str], None]
    ) -> None:
        self._guard, self._every, self._saver, self._see = guard, every, saver, see
        self.clean = start
        """The last step at which nothing differed."""

        self.count = 0
        """Guarded steps of this process at which nothing differed."""

        if saver is not None:
            saver.trust(start)

    def due(self, step: int) -> bool:
        """Whether the step after so many is guarded."""
        return step % self._every == 0

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        """Compare what replicas hold; then a step of which all compute one micro-batch. Collective. CorruptionError."""
        try:
            self._guard.compare_state()
            output = self._guard.step(ticket.step // self._every, ticket, batch, self._see)
        except CorruptionError as error:
            raise self._going_back(error) from None
        self.clean, self.count = ticket.step, self.count + 1
        if self._saver is not None:
            self._saver.trust(ticket.step)
        return output

    def compare_state(self) -> None:
        """Before a save, and at the end: compare what replicas hold. Collective. CorruptionError."""
        try:
            self._guard.compare_state()
        except CorruptionError as error:
            raise self._going_back(error) from None

    def _going_back(self, error: CorruptionError) -> CorruptionError:
        """The error with where the next start goes on; checkpoints since the last clean step are set aside."""
        moved, left = self._saver.set_aside(self.clean) if self._saver is not None else ([], "")
        aside = f"; what was saved since may be wrong and is set aside: {', '.join(moved)}" if moved else ""
        onwards = f"goes on from {left}" if left else "begins as the first one did"
        return CorruptionError(
            f"{error}; step {self.clean} was the last without a difference{aside}; the next start {onwards}",
            error.blames,
        )


def guarded_steps(
    program: Program, every: int, start: int, saver: Suspects | None, see: Callable[[str], None]
) -> GuardedSteps | None:
    """None where `every` is 0. ConfigError where the program cannot compare its replicas. Collective."""
    if not every:
        return None
    guard = program.guard()
    if guard is None:
        raise ConfigError(
            f"train.guard_every={every} compares replicas, and {program.plugin or 'this strategy'} has none that can "
            "be compared; use train.guard_every=0, or strategy=ddp with several processes"
        )
    return GuardedSteps(guard, every, start, saver, see)
