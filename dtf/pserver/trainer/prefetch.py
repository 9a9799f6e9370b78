"""Fetches work ahead of a trainer's computing: leases from server 0, and the rows of data that they are about."""

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
from dtf.pserver.leases import TRAIN, Key, Lease
from dtf.pserver.net import messages
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.messages import LEASE
from dtf.pserver.net.transport import Lost, Transport
from dtf.pserver.row_routing import RowRequest

AHEAD = 2
"""Leases that a trainer holds at once: the one that is computed, and the next. With one more `async` would pull
parameters a step earlier: each step waits less, and the loss falls later.
"""

WAIT_S, DEADLINE_S = 4.0, 30.0
"""How long server 0 may wait for work to turn up, and how long its answer may take."""


class PreparedBatch(NamedTuple):
    """One ticket of a lease with its rows, on the device, and the rows of tables that it needs."""

    lease: Lease
    ticket: Train
    batch: Batch
    row_request: RowRequest
    unread: int  # rows that could not be read
    number: int = 0  # of those that were prepared before

    @property
    def order(self) -> tuple[Key, int]:
        """Sort key. The first step comes first, as others may wait for it. The tickets of a lease of several steps stay
        in a row, whatever is granted meanwhile.
        """
        return (self.lease.key if len(self.lease.tickets) == 1 else (TRAIN, 0, 0)), self.number


class Prefetcher:
    """A thread that keeps up to AHEAD batches ready. `identity`: of the trainer, as in `messages.hello_schemas`;
    `prepare` reads the rows of a ticket.

    When server 0 has removed this trainer, `must_rejoin` is true, and the thread waits until `rejoined` is called.
    `reason`: why the run is `over`.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Mapping[str, int | str],
        prepare: Callable[[Lease, Train], PreparedBatch],
        stopping: Callable[[], bool],
    ) -> None:
        self._transport, self._identity, self._prepare, self._stopping = transport, identity, prepare, stopping
        self._schemas = messages.lease_schemas()
        self._change = threading.Condition()
        self._ready: list[tuple[tuple[Key, int], PreparedBatch]] = []
        self.must_rejoin, self.reason = False, ""
        self._ended: str | None = None  # why the run is over, once server 0 has said so
        self._asked = 0.0  # when server 0 heard of this trainer last
        self._numbers = itertools.count()  # of what is prepared: among equals the first one comes first
        self._held: set[Key] = set()
        self._sending: set[Key] = set()
        self._done: list[Key] = []
        self._granted: list[Lease] = []  # whose rows are not read yet
        self._asking = False  # whether a request that is under way asks for more: the next one would not know of those
        self._limit, self._over, self._closed = AHEAD, False, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, timeout_s: float) -> PreparedBatch | None:
        """The first batch; None when none is ready within `timeout_s` or the run is `over`.

        Raises the error of the thread.
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
        """The batches that are ready, the first one first; they stay in the queue."""
        with self._change:
            return [entry[-1] for entry in sorted(self._ready)]

    def put_back(self, prepared: PreparedBatch) -> None:
        """Put a batch back that cannot be computed yet, as the work before it is not done.

        Another trainer may have left that work, so one lease more than are held is asked for, each time, until it
        comes.
        """
        with self._change:
            heapq.heappush(self._ready, (prepared.order, prepared))
            self._limit = max(AHEAD, len(self._held)) + 1
            self._change.notify_all()

    def rejoined(self) -> None:
        """The trainer has joined again."""
        with self._change:
            self.must_rejoin = False
            self._change.notify_all()

    def sending(self, lease: Lease, wait_s: float) -> bytes | None:
        """A lease is computed and its push is about to go: another lease may take its place. Returns the request of
        LEASE that goes along, whose reply is for `answered`; None where there is nothing to ask for.

        `wait_s`: how long server 0 may wait for a lease to grant.
        """
        with self._change:
            self._sending.add(lease.key)
            if self._asking or self._capacity() <= 0:
                return None
            self._asking = True
            return self._question(self._capacity(), wait_s)

    def answered(self, reply: bytes) -> None:
        """Server 0's reply to what `sending` returned."""
        with self._change:
            self._asking = False
            self._take(decode(self._schemas[1], reply))
            self._change.notify_all()

    def finished(self, lease: Lease) -> None:
        """A lease is done, or not wanted any more."""
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
        """Stop the thread."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def leave(self) -> None:
        """Tell server 0 that this trainer knows that the run is over, and asks for nothing more; the service stays
        until then.
        """
        nothing = np.empty((0, 3), np.int64)
        with suppress(Lost):  # server 0 does not wait for ever
            self._transport.call(
                LEASE,
                encode(self._schemas[0], {**self._identity, "leaving": 1}, {"done": nothing, "has": nothing}),
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
        """Whether another batch may be prepared; waits for that as long as server 0 need not hear of this trainer."""
        with self._change:
            return self._change.wait_for(lambda: len(self._ready) < self._limit or self._closed, WAIT_S)

    def _capacity(self) -> int:
        """How many more leases may be asked for."""
        return self._limit - len(self._held - self._sending)

    def _question(self, most: int, wait_s: float) -> bytes:
        """A request of LEASE, which reports finished work and what is held. `_change` is held."""
        done, self._done, has = self._done, [], list(self._held)
        request = {**self._identity, "most": most, "wait_s": wait_s, "stopping": int(self._stopping())}
        return encode(
            self._schemas[0],
            request,
            {name: np.array(keys, np.int64).reshape(-1, 3) for name, keys in (("done", done), ("has", has))},
        )

    def _ask(self, more: bool = False) -> None:
        """Report finished work and what is held to server 0, and with `more` ask for leases."""
        with self._change:
            most = max(0, self._capacity()) if more and not self._asking else 0
            self._asking |= most > 0
            question = self._question(most, WAIT_S if most else 0.0)
        answer = decode(self._schemas[1], self._transport.call(LEASE, question, DEADLINE_S))
        with self._change:
            self._asking &= most == 0
            self._take(answer)

    def _take(self, answer: Message) -> None:
        """`_change` is held."""
        self._asked = monotonic()
        if not answer.scalars["known"]:  # what this trainer held is granted anew, to whomever
            self._held, self._sending, self._ready, self._granted, self.must_rejoin = set(), set(), [], [], True
            self._change.notify_all()
        leases = [lease for lease in messages.unpack_leases(answer.arrays) if lease.key not in self._held]
        self._held |= {lease.key for lease in leases}
        self._granted += leases
        if answer.scalars["state"] == messages.OVER:
            self._ended = str(answer.scalars["reason"])

    def _fetch(self) -> None:
        """Read the rows of what is granted; ask for more where nothing is and no push asks."""
        with self._change:
            self._change.wait_for(
                lambda: (
                    self._granted
                    or self._ended is not None
                    or (self._capacity() > 0 and not self._asking)
                    or self._closed
                ),
                WAIT_S,
            )
            self._change.wait_for(lambda: not self.must_rejoin or self._closed)
            asks = not self._granted and self._ended is None
        if asks:
            self._ask(more=True)
        with self._change:
            leases, self._granted = self._granted, []
        for lease in leases:
            for ticket in lease.tickets:
                while not self._room() or monotonic() - self._asked > WAIT_S:
                    self._ask()
                    if self.must_rejoin:
                        return
                with self._change:
                    # server 0 may have removed this trainer meanwhile
                    unwanted = self._closed or lease.key not in self._held
                if unwanted:
                    break
                prepared = self._prepare(lease, ticket)._replace(number=next(self._numbers))
                with self._change:
                    if lease.key in self._held:
                        heapq.heappush(self._ready, (prepared.order, prepared))
                        self._change.notify_all()
        with self._change:
            if self._ended is not None and not self._granted:
                self._over, self.reason = True, self._ended
                self._change.notify_all()
