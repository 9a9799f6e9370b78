"""Work for a trainer, fetched ahead of its computing: leases from server 0, and the rows of data they are about."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import numpy as np

from dtf.core.types import Batch, Train
from dtf.pserver.net import messages
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.messages import LEASE
from dtf.pserver.net.transport import Lost, Transport
from dtf.pserver.row_routing import RowRequest
from dtf.pserver.server.leases import TRAIN, Key, Lease

AHEAD = 3
"""Leases that are held at once: the one that is computed, the next, and one that is read meanwhile."""

WAIT_S, DEADLINE_S = 4.0, 30.0
"""How long server 0 may wait for work to turn up, and how long its answer may take."""


class PreparedBatch(NamedTuple):
    """One ticket of a lease with its rows, on the device, and what is wanted of the servers for it."""

    lease: Lease
    ticket: Train
    batch: Batch
    row_request: RowRequest
    unread: int  # rows that could not be read
    number: int = 0  # of those that were prepared before

    @property
    def order(self) -> tuple[Key, int]:
        """The first step comes first, as others may wait for it; those of a lease of several follow each other,
        whatever is granted meanwhile.
        """
        return (self.lease.key if len(self.lease.tickets) == 1 else (TRAIN, 0, 0)), self.number


class Prefetcher:
    """A thread that keeps up to AHEAD pieces of work ready. `name`: of the trainer, as in `protocol.hello_schemas`;
    `prepare` reads the rows of a ticket.

    When server 0 has given this trainer up, `must_rejoin` is so, and it waits until the trainer has `rejoined` again. `reason`:
    why the run is `over`.
    """

    def __init__(
        self,
        transport: Transport,
        name: Mapping[str, int | str],
        prepare: Callable[[Lease, Train], PreparedBatch],
        stopping: Callable[[], bool],
    ) -> None:
        self._transport, self._name, self._prepare, self._stopping = transport, name, prepare, stopping
        self._schemas = messages.lease_schemas()
        self._change = threading.Condition()
        self._ready: list[tuple[tuple[Key, int], PreparedBatch]] = []
        self.must_rejoin, self.reason = False, ""
        self._asked = 0.0  # when server 0 heard of this trainer last
        self._numbers = itertools.count()  # of what is prepared: among equals the first one comes first
        self._held: set[Key] = set()
        self._sending: set[Key] = set()
        self._done: list[Key] = []
        self._limit, self._over, self._closed = AHEAD, False, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, timeout_s: float) -> PreparedBatch | None:
        """The first piece of work; None when there is none yet, or will be none: see `over`.

        Raises what the thread met.
        """
        with self._change:
            self._change.wait_for(lambda: self._ready or self._over or self._error or self.must_rejoin, timeout_s)
            if self._error is not None:
                raise self._error
            if not self._ready:
                return None
            self._change.notify_all()
            return heapq.heappop(self._ready)[-1]

    def ready(self) -> list[PreparedBatch]:
        """The pieces to come, the first one first; they stay there."""
        with self._change:
            return [each[-1] for each in sorted(self._ready)]

    def put_back(self, prepared: PreparedBatch) -> None:
        """It cannot be done yet: something before it has to be, which others may have left; ask for one more than there
        is, each time, until it comes.
        """
        with self._change:
            heapq.heappush(self._ready, (prepared.order, prepared))
            self._limit = max(AHEAD, len(self._held)) + 1
            self._change.notify_all()

    def rejoined(self) -> None:
        """Server 0 knows this trainer again; nothing that it held before is its own."""
        with self._change:
            self.must_rejoin = False
            self._change.notify_all()

    def sending(self, lease: Lease) -> None:
        """A piece of work is computed and on its way: another one may take its place."""
        with self._change:
            self._sending.add(lease.key)
            self._change.notify_all()

    def finished(self, lease: Lease) -> None:
        """A piece of work is done, or not wanted any more."""
        with self._change:
            self._held.discard(lease.key)
            self._sending.discard(lease.key)
            self._done.append(lease.key)
            self._limit = AHEAD
            self._change.notify_all()

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._over and not self._ready

    def close(self) -> None:
        """Ask for no more."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def leave(self) -> None:
        """Tell server 0 that this trainer knows that the run is over and asks for nothing more: until then the service
        stays.
        """
        nothing = np.empty((0, 3), np.int64)
        with suppress(Lost):  # it waits for nobody for ever
            self._transport.call(
                LEASE,
                encode(self._schemas[0], {**self._name, "leaving": 1}, {"done": nothing, "has": nothing}),
                DEADLINE_S,
            )

    def _run(self) -> None:
        try:
            while not (self._over or self._closed):
                self._fetch()
        except BaseException as error:  # noqa: BLE001  # the thread that computes raises it
            with self._change:
                self._error = error
                self._change.notify_all()

    def _room(self) -> bool:
        """Whether more may be prepared, within a time in which server 0 should hear that this trainer lives."""
        with self._change:
            return self._change.wait_for(lambda: len(self._ready) < self._limit or self._closed, WAIT_S)

    def _capacity(self) -> int:
        return self._limit - len(self._held - self._sending)

    def _ask(self, more: bool = False) -> Message:
        """Server 0's answer to what is done, what is held, and whether `more` may come."""
        with self._change:
            done, self._done, has = self._done, [], list(self._held)
            most = max(0, self._capacity()) if more else 0
        request = {**self._name, "most": most, "wait_s": WAIT_S if most else 0.0, "stopping": int(self._stopping())}
        data = encode(
            self._schemas[0],
            request,
            {name: np.array(keys, np.int64).reshape(-1, 3) for name, keys in (("done", done), ("has", has))},
        )
        answer = decode(self._schemas[1], self._transport.call(LEASE, data, DEADLINE_S))
        self._asked = monotonic()
        if not answer.scalars["known"]:
            with self._change:
                # it is granted anew, to whomever
                self._held, self._sending, self._ready, self.must_rejoin = set(), set(), [], True
                self._change.notify_all()
        return answer

    def _fetch(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._capacity() > 0 or self._closed, WAIT_S)
            self._change.wait_for(lambda: not self.must_rejoin or self._closed)
        answer = self._ask(more=True)
        leases = messages.unpack_leases(answer.arrays)
        with self._change:
            leases = [lease for lease in leases if lease.key not in self._held]
            self._held |= {lease.key for lease in leases}
        for lease in leases:
            for ticket in lease.tickets:
                while not self._room() or monotonic() - self._asked > WAIT_S:
                    self._ask()
                    if self.must_rejoin:
                        return
                if self._closed:
                    return
                prepared = self._prepare(lease, ticket)._replace(number=next(self._numbers))
                with self._change:
                    heapq.heappush(self._ready, (prepared.order, prepared))
                    self._change.notify_all()
        if answer.scalars["state"] == messages.OVER:
            with self._change:
                self._over, self.reason = True, str(answer.scalars["reason"])
                self._change.notify_all()
