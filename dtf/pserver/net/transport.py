"""Requests and their answers as a caller sees them, whatever carries them: what can go wrong, and sending again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from dtf.core.errors import DtfError, PeerError

MOST_BYTES = 1 << 30
"""Of a message, either way."""

LONGEST = 512
"""Characters of a text from elsewhere that are kept."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0


class Lost(PeerError):
    """The server could not be reached, or no answer came in time. Whether it did what was asked is unknown."""


class Failed(PeerError):
    """The server met an error of its own; its log has it."""


class Stale(PeerError):
    """The server belongs to another attempt of the run, or what was sent does."""


class Refused(DtfError):
    """The server understood, and will not: a handler raises it with a short text that the client gets."""


class Pending(Protocol):
    """An answer that may be on its way."""

    def result(self) -> bytes:
        """Wait for it. Raises what `Transport.call` raises."""
        ...


class Transport(Protocol):
    """What carries a request to one server: a `Client`, and whatever stands before it."""

    def call(self, method: str, data: bytes, deadline_s: float) -> bytes:
        """The answer. Lost, Failed, Stale, Refused or AuthError."""
        ...

    def start(self, method: str, data: bytes, deadline_s: float) -> Pending:
        """The same without waiting. Dearer than `call` by itself: for requests that are to be on their way together."""
        ...


def short(text: str) -> str:
    """A text from elsewhere, or towards it: printable ASCII, not long. What is so already stays as it is."""
    return "".join(
        each if " " <= each <= "~" else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text[:LONGEST]
    )[:LONGEST]


class RetryingTransport:
    """A transport that sends what was lost again until `patience_s` after the first try.

    For requests that a server knows to be the same one by their key.
    """

    def __init__(self, transport: Transport, patience_s: float) -> None:
        self._transport, self._patience_s = transport, patience_s
        self._closed = threading.Event()
        # its own: how long to wait must not depend on, or change, the numbers of the run
        self._jitter = random.Random()
        self.retries = 0
        """Requests that were sent again."""

    def call(self, method: str, data: bytes, deadline_s: float) -> bytes:
        return self._persist(
            lambda: self._transport.call(method, data, deadline_s),
            method,
            data,
            deadline_s,
            monotonic() + self._patience_s,
        )

    def start(self, method: str, data: bytes, deadline_s: float) -> Pending:
        until = monotonic() + self._patience_s
        return _Persistent(self, self._transport.start(method, data, deadline_s), method, data, deadline_s, until)

    def close(self) -> None:
        """Whoever waits to send again gives up at once."""
        self._closed.set()

    def _persist(self, first: Callable[[], bytes], method: str, data: bytes, deadline_s: float, until: float) -> bytes:
        attempt, wait_s = first, _FIRST_WAIT_S
        while True:
            try:
                return attempt()
            except Lost:
                left = until - monotonic()
                if left <= 0 or self._closed.wait(min(left, wait_s * self._jitter.uniform(0.5, 1.0))):
                    raise
            self.retries += 1
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            left = max(until - monotonic(), _FIRST_WAIT_S)
            attempt = partial(self._transport.call, method, data, min(deadline_s, left))


class _Persistent:
    def __init__(
        self, owner: RetryingTransport, first: Pending, method: str, data: bytes, deadline_s: float, until: float
    ) -> None:
        self._owner, self._first, self._rest = owner, first, (method, data, deadline_s, until)

    def result(self) -> bytes:
        return self._owner._persist(self._first.result, *self._rest)
