"""Requests and answers as a caller sees them, independent of gRPC: errors, and sending again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from dtf.core.errors import DtfError, PeerError
from dtf.pserver.net.codec import Buffer, Parts

MOST_BYTES = 1 << 30
"""Most bytes of a message, in either direction."""

LONGEST = 512
"""Longest text of an error from another process that is kept, in characters."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0


class Lost(PeerError):
    """The server could not be reached, or no answer came in time. Whether it did what was asked is unknown."""


class Failed(PeerError):
    """The server met an error of its own; its log has the traceback."""


class Stale(PeerError):
    """The server, or what was sent, belongs to another attempt of the run."""


class Refused(DtfError):
    """The server understood the request and rejects it. A handler raises it with a short text that the client gets."""


class Pending(Protocol):
    """An answer that may still be under way."""

    def result(self) -> Buffer:
        """Wait for the answer. Raises what `Transport.call` raises."""
        ...


class Transport(Protocol):
    """Carries requests to one server: a `Client`, or a wrapper around one."""

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> Buffer:
        """Send a request and return the answer. Raises Lost, Failed, Stale, Refused or AuthError."""
        ...

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Pending:
        """As `call`, without waiting. Slower than `call` for a single request; use it to have several under way at
        once.
        """
        ...


def short(text: str) -> str:
    """The text as printable ASCII of at most LONGEST characters. What is so already stays as it is."""
    return "".join(
        character if " " <= character <= "~" else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text[:LONGEST]
    )[:LONGEST]


class RetryingTransport:
    """A transport that sends a lost request again until `patience_s` after the first try.

    For requests that the server recognises by a key when they come twice.
    """

    def __init__(self, transport: Transport, patience_s: float) -> None:
        self._transport, self._patience_s = transport, patience_s
        self._closed = threading.Event()
        # its own: how long to wait must not depend on, or change, the numbers of the run
        self._jitter = random.Random()
        self.retries = 0
        """Requests that were sent again."""

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> Buffer:
        return self._persist(
            lambda: self._transport.call(method, data, deadline_s),
            method,
            data,
            deadline_s,
            monotonic() + self._patience_s,
        )

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Pending:
        until = monotonic() + self._patience_s
        return _Persistent(self, self._transport.start(method, data, deadline_s), method, data, deadline_s, until)

    def close(self) -> None:
        """Stop retrying: a call that waits to send again raises Lost at once."""
        self._closed.set()

    def _persist(
        self, first: Callable[[], Buffer], method: str, data: bytes | Parts, deadline_s: float, until: float
    ) -> Buffer:
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
        self,
        owner: RetryingTransport,
        first: Pending,
        method: str,
        data: bytes | Parts,
        deadline_s: float,
        until: float,
    ) -> None:
        self._owner, self._first, self._rest = owner, first, (method, data, deadline_s, until)

    def result(self) -> Buffer:
        return self._owner._persist(self._first.result, *self._rest)
