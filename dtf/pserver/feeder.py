"""Work for a trainer, fetched ahead of its computing: leases from server 0, and the rows of data they are about."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dtf.pserver import protocol
from dtf.pserver.ledger import Lease
from dtf.pserver.protocol import LEASE
from dtf.pserver.rows import Wanted
from dtf.pserver.transport import Transport
from dtf.pserver.wire import decode, encode
from dtf.values import Batch, Train

AHEAD = 2
"""Leases that are held at once: the one that is computed and the next."""

WAIT_S, DEADLINE_S = 4.0, 30.0
"""How long server 0 may wait for work to turn up, and how long its answer may take."""


class Prepared(NamedTuple):
    """One ticket of a lease with its rows, on the device, and what is wanted of the servers for it."""

    lease: Lease
    ticket: Train
    batch: Batch
    wanted: Wanted
    unread: int  # rows that could not be read
    pulled: Any = None

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The first comes first."""
        return (*self.lease.key, self.ticket.step)


class Feeder:
    """A thread that keeps up to AHEAD pieces of work ready. `prepare` reads the rows of a ticket; `join` is called anew when server 0 has given this up."""

    def __init__(
        self, transport: Transport, trainer: int, prepare: Callable[[Lease, Train], Prepared], join: Callable[[], None], stopping: Callable[[], bool]
    ) -> None:
        self._transport, self._trainer, self._prepare, self._join, self._stopping = transport, trainer, prepare, join, stopping
        self._schemas = protocol.lease_schemas()
        self._change = threading.Condition()
        self._ready: list[tuple[tuple[int, int, int, int], Prepared]] = []
        self._held: set[tuple[int, int, int]] = set()
        self._done: list[tuple[int, int, int]] = []
        self._limit, self._over, self._closed = AHEAD, False, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, timeout_s: float) -> Prepared | None:
        """The first piece of work; None when there is none yet, or will be none: see `over`. Raises what the thread met."""
        with self._change:
            self._change.wait_for(lambda: self._ready or self._over or self._error, timeout_s)
            if self._error is not None:
                raise self._error
            if not self._ready:
                return None
            self._change.notify_all()
            return heapq.heappop(self._ready)[1]

    def peek(self) -> Prepared | None:
        """The next piece, if it is ready; it stays there."""
        with self._change:
            return self._ready[0][1] if self._ready else None

    def back(self, prepared: Prepared) -> None:
        """It cannot be done yet: something before it has to be, which others may have left; ask for more than usual."""
        with self._change:
            heapq.heappush(self._ready, (prepared.order, prepared))
            self._limit = AHEAD + 1
            self._change.notify_all()

    def finished(self, lease: Lease) -> None:
        """A piece of work is done, or not wanted any more."""
        with self._change:
            self._held.discard(lease.key)
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

    def _run(self) -> None:
        try:
            while not (self._over or self._closed):
                self._fetch()
        except BaseException as error:  # noqa: BLE001  # the thread that computes raises it
            with self._change:
                self._error = error
                self._change.notify_all()

    def _fetch(self) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._held) < self._limit or self._closed, WAIT_S)
            done, self._done = self._done, []
            most = max(0, self._limit - len(self._held))
        request = {"trainer": self._trainer, "most": most, "wait_s": WAIT_S if most else 0.0, "stopping": int(self._stopping())}
        data = encode(self._schemas[0], request, {"done": np.array(done, np.int64).reshape(-1, 3)})
        answer = decode(self._schemas[1], self._transport.call(LEASE, data, DEADLINE_S))
        if not answer.scalars["known"]:
            with self._change:
                self._held = {prepared.lease.key for _, prepared in self._ready}
            self._join()
            return
        leases = protocol.unpack_leases(answer.arrays)
        with self._change:
            self._held |= {lease.key for lease in leases}
        for lease in leases:
            for ticket in lease.tickets:
                with self._change:
                    self._change.wait_for(lambda: len(self._ready) < self._limit or self._closed)
                    if self._closed:
                        return
                prepared = self._prepare(lease, ticket)
                with self._change:
                    heapq.heappush(self._ready, (prepared.order, prepared))
                    self._change.notify_all()
        if answer.scalars["state"] == protocol.OVER:
            with self._change:
                self._over = True
                self._change.notify_all()
