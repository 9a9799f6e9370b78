"""How long a restart took, part by part, once the ranks have done their first step again."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, Protocol, TypeVar

from dtf.core.types import Event, Note, Stepped


class Loss(NamedTuple):
    """Moments of time.monotonic() at the end of an attempt that is not the last."""

    silent: float  # the lost rank gave its last sign
    noticed: float
    ended: float  # the last of the other ranks

    @classmethod
    def seen(cls, silent: float, *noticed: float) -> Loss:
        """Of ranks that have just ended. 0: not known, or not noticed in this way."""
        ended = monotonic()
        first = min(filter(None, noticed), default=ended)
        return cls(silent or first, first, ended)


class Attempt(Protocol):
    """Ranks that were lost, see `worker_group.WorkerGroup`."""

    @property
    def loss(self) -> Loss: ...


T = TypeVar("T", bound=Attempt)


class RecoveryReport:
    """Passes events on to `see`, and turns the first step after a restart into a line."""

    def __init__(self, see: Callable[[Event], None]) -> None:
        self._see = see
        self._attempt: Attempt | None = None
        self._loss: Loss | None = None

    def begin(self, attempt: T) -> T:
        """The ranks of another attempt are about to be started; those of the one before have ended."""
        self._loss = self._attempt.loss if self._attempt else None
        self._attempt = attempt
        return attempt

    def see(self, event: Event) -> None:
        if not isinstance(event, Stepped):
            self._see(event)
        elif (loss := self._loss) is not None:
            self._loss = None
            self._see(Note("info", recovered(loss, event.marks)))


def recovered(loss: Loss, marks: dict[str, float]) -> str:
    """`recovered in 0.83 s: noticed 0.02, stopped 0.10, ...`. `marks`: what rank 0 had done, and when, in order."""
    times = {"noticed": loss.noticed, "stopped": loss.ended, **marks}
    last, parts = loss.silent, []
    for name, at in times.items():
        parts.append(f"{name} {max(0.0, at - last):.2f}")
        last = max(last, at)
    return f"recovered in {last - loss.silent:.2f} s: {', '.join(parts)}"
