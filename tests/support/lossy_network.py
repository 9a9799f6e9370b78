"""A lossy network between a client and a server: it loses requests and responses, doubles requests and changes their
order, driven by a seed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from dtf.pserver.net.codec import Buffer, Parts
from dtf.pserver.net.shared_memory import _HERE as IN_MEMORY
from dtf.pserver.net.transport import Lost, Pending, Refused, Transport


class LossyTransport:
    """A wrapper of a transport. Each rate is a probability per request; `met` counts the events.

    A lost request is never sent; a lost response is that of a request that was. A doubled request is sent twice, the
    second time after any number of later ones have passed. A late request is one of `start` that is sent after the next
    one, or when its result is asked for. Nothing waits.
    """

    def __init__(
        self,
        inner: Transport,
        seed: int,
        lose_request: float = 0.1,
        lose_response: float = 0.1,
        double: float = 0.1,
        late: float = 0.1,
    ) -> None:
        self._inner, self._random, self._lock = inner, random.Random(seed), threading.Lock()
        self._rates = {"lose_request": lose_request, "lose_response": lose_response, "double": double, "late": late}
        self._doubles: list[tuple[str, bytes, float]] = []
        self._late: list[_Late] = []
        self.met: Counter[str] = Counter()

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> Buffer:
        return self.start(method, data, deadline_s).result()

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Pending:
        data = bytes(data)  # a network has a copy
        with self._lock:
            fate = {name for name, rate in self._rates.items() if self._random.random() < rate}
            self.met.update(fate)
            old = [
                self._doubles.pop(self._random.randrange(len(self._doubles)))
                for _ in range(len(self._doubles))
                if self._random.random() < 0.5
            ]
            late, self._late = self._late, []
            if "double" in fate and data[:4] != IN_MEMORY:
                self._doubles.append((method, data, deadline_s))
        if "lose_request" in fate:
            pending: Pending = _Lost(None)
        elif "late" in fate:
            pending = _Late(self._inner, method, data, deadline_s)
            with self._lock:
                self._late.append(pending)
        else:
            pending = self._inner.start(method, data, deadline_s)
        if "double" in fate and data[:4] == IN_MEMORY:
            pending = _Doubled(pending, lambda: self._doubles.append((method, data, deadline_s)))
        for request in late:
            request.send()
        for double in old:
            self._inner.start(*double)  # nothing waits for its answer
        return _Lost(pending) if "lose_response" in fate else pending

    def flush(self) -> None:
        """Send what is still to be sent a second time, and wait until the server has had it."""
        with self._lock:
            old, self._doubles = self._doubles, []
        for double in old:
            with suppress(Refused):  # what lay in shared memory is there once
                self._inner.start(*double).result()


class _Lost:
    def __init__(self, sent: Pending | None) -> None:
        self._sent = sent

    def result(self) -> Buffer:
        if self._sent:
            self._sent.result()
        raise Lost("the interposer lost it")


class _Doubled:
    """A request in shared memory. Only one copy of it is taken: the second is sent after the first was answered."""

    def __init__(self, first: Pending, then: Callable[[], None]) -> None:
        self._first, self._then = first, then

    def result(self) -> Buffer:
        try:
            return self._first.result()
        finally:
            self._then()


class _Late:
    def __init__(self, inner: Transport, method: str, data: bytes | Parts, deadline_s: float) -> None:
        self._inner, self._request, self._lock = inner, (method, data, deadline_s), threading.Lock()
        self._sent: Pending | None = None

    def send(self) -> Pending:
        with self._lock:
            self._sent = self._sent or self._inner.start(*self._request)
            return self._sent

    def result(self) -> Buffer:
        return self.send().result()
