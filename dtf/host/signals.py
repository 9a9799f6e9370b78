"""Signals that ask the launching process to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from dtf.core.errors import Preempted
from dtf.host import starting

_ONE_SIGNAL_S = 0.2
"""Signals closer than this are one: `timeout` and schedulers signal a process and then its whole group."""
_scheduled: list[bool] = []


def sent_by_scheduler() -> None:
    """Let SIGTERM and SIGHUP count once from now on. A scheduler sends them as often as it likes: to a step and to its
    job, at the first notice and at the end of the grace. It has SIGKILL for what it means to end at once.
    """
    _scheduled.append(True)


def what_insists() -> str:
    """What counts as a second request: any signal, or `Ctrl-C`, in a step of Slurm too, whoever wrote its script."""
    return "Ctrl-C" if _scheduled or "SLURM_STEP_ID" in os.environ else "signal"


class Stop:
    """Counts SIGTERM, SIGINT and SIGHUP while it is open. `socket` becomes readable at each of them.

    One that is opened while another is open tells that one too, and knows what it has heard. Outside the main thread no
    signal arrives.
    """

    def __init__(self) -> None:
        self.count, self._signals, self._last = 0, 0, -_ONE_SIGNAL_S
        self.socket, self._waker = socket.socketpair()

    def __enter__(self) -> Self:
        self._old: dict[int, Any] = {}
        if asked_to_stop():
            self._signals = 1
            self._count(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            try:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._old[number] = signal.signal(number, self._heard)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            # after a signal the command ends, and has told so: `starting` would say that nothing had begun
            ends = self.count and starting.answers(handler)
            signal.signal(number, signal.SIG_IGN if ends else handler)
        self.close()

    def close(self) -> None:
        self.socket.close()
        self._waker.close()

    def ask(self) -> None:
        """Count a request that came in another way than by a signal to this process. A first signal adds nothing to it:
        a scheduler signals all hosts, and who hears of it first tells the others.
        """
        self._count(1)

    def _heard(self, number: int, frame: object) -> None:
        outer = getattr(self._old.get(number), "__self__", None)
        if isinstance(outer, Stop):
            outer._heard(number, frame)
        now, before = time.monotonic(), self._last
        self._last = now
        repeated = self._signals > 0 and number != signal.SIGINT and what_insists() != "signal"
        if now - before >= _ONE_SIGNAL_S and not repeated:
            self._signals += 1
            self._count(self._signals)

    def _count(self, least: int) -> None:
        if self.count >= least:
            return
        self.count = least
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!", socket.MSG_DONTWAIT)


def asked_to_stop() -> bool:
    """Whether the Stop that is open, if there is one, has heard a signal. For whoever listens in its place."""
    stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return isinstance(stop, Stop) and stop.count > 0


@contextlib.contextmanager
def preempting(message: str) -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise Preempted(message), as SIGINT raises KeyboardInterrupt. While a Stop
    is open, that one takes them.
    """

    def heard(number: int, frame: object) -> NoReturn:
        raise Preempted(message)

    old: dict[int, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                with contextlib.suppress(ValueError):  # not the main thread
                    old[number] = signal.signal(number, heard)
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
