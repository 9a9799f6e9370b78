"""How manually started processes find each other: they ask server 0, by MEET, which attempt of the run this is and
where its servers meet.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from dtf.core.consistency import describe_differences
from dtf.core.errors import ConfigError, DtfError, Exit, PeerError, Preempted
from dtf.pserver.net.codec import decode, encode
from dtf.pserver.net.messages import MEET, json_of, meet_schemas
from dtf.pserver.net.transport import Lost, Refused, Transport

TRAINER = -1
"""In the place of a server's number, in the request of a trainer."""

ASK_S, DEADLINE_S = 0.25, 5.0
"""Time between two requests while waiting, and how long an answer may take."""

LOOK_S = 1.0
"""Time between two checks of a LivenessMonitor."""

QUIET_S = 3.0
"""Waiting shorter than this is not reported. Each line doubles the time until the next."""


class RendezvousTimeout(PeerError):
    """Servers did not come, or come back, within `launcher.timeout_s`."""

    patient = True


class WaitReport:
    """Tells `say` what is waited for: after QUIET_S, and again and again as long as it lasts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._start, self._next_s = say, monotonic(), QUIET_S

    def tell(self, what: str) -> None:
        """To be called regularly while waiting."""
        waited_s = monotonic() - self._start
        if waited_s > self._next_s:
            self._next_s = 2 * waited_s
            self._say(f"{what} ({waited_s:.0f} s so far)")


def named(servers: Iterable[int], endpoints: Sequence[str]) -> str:
    """Servers with their endpoints, for people."""
    return ", ".join(f"server {server} (at {endpoints[server]})" for server in servers)


class RendezvousInfo(NamedTuple):
    """What server 0 says of this attempt of the run. Travels as a JSON list, in this order."""

    generation: str  # name of the attempt
    store: str  # where servers meet, "host:port"
    folder: str
    run_id: str
    host: str
    missing: Sequence[int] = ()  # servers that are not there
    stopping: bool = False  # the run was asked to stop


class Coordinator:
    """Server 0's part: which servers have come, and whether they are still there.

    Threads of the service call `answer`. `silence_s`: a server that has not asked for so long is lost.
    `stop_requested`: whether server 0 was asked to stop.
    """

    def __init__(
        self,
        info: RendezvousInfo,
        servers: int,
        facts: dict[str, Any],
        silence_s: float,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._info, self._facts, self._silence_s = info, facts, silence_s
        self._stop_requested, self._other_stops = stop_requested, False
        self._lock = threading.Condition()
        self._over: DtfError | None = None
        self._heard_end: set[int] = set()  # servers that know of it
        self._others = set(range(1, servers))
        self._process_ids: dict[int, int] = {}  # by server: the random number that its process drew
        self._heard_at: dict[int, float] = {}
        self._complete = not self._others
        self._lost = ""
        self._schemas = meet_schemas()

    def answer(self, data: bytes) -> bytes:
        """The handler of MEET. Servers ask again and again, which shows that they are alive.

        Refused for a process that cannot take part.
        """
        message = decode(self._schemas[0], data)
        server, born, servers = (int(message.scalars[name]) for name in ("server", "born", "servers"))
        if servers != len(self._others) + 1:
            raise Refused(f"launcher.endpoints names {servers} server(s), and {len(self._others) + 1} for server 0")
        if server != TRAINER and server not in self._others:
            raise Refused(f"launcher.id={server} is none of 1 to {len(self._others)}")
        refusal = describe_differences({"server 0": self._facts, "this process": json_of(message, "facts")})
        if refusal:
            raise Refused(refusal)
        with self._lock:
            if server != TRAINER:
                if self._complete and self._process_ids[server] != born:
                    self._lost = self._lost or f"server {server} was started again"
                self._process_ids[server], self._heard_at[server] = born, monotonic()
                self._other_stops = self._other_stops or bool(message.scalars["stopping"])
                if self._over:
                    self._heard_end.add(server)
                    self._lock.notify_all()
            now = self._info._replace(missing=self._missing(), stopping=self.stop_requested)
            info = np.frombuffer(json.dumps(now).encode(), np.uint8)
            complete = int(self._complete and not self._lost)
            over = {"over": int(self._over.exit if self._over else 0), "reason": str(self._over or "")}
            return encode(self._schemas[1], {"complete": complete, **over}, {"told": info})

    @property
    def stop_requested(self) -> bool:
        """Whether a server was asked to stop, and with it the run."""
        return self._stop_requested() or self._other_stops

    def complete(self) -> bool:
        """Whether all servers have come. Once true it stays true: a server that leaves later ends the attempt."""
        with self._lock:
            self._complete = self._complete or not self._missing()
            return self._complete

    def missing(self) -> list[int]:
        """Servers that have not come, or have gone."""
        with self._lock:
            return self._missing()

    def _missing(self) -> list[int]:
        now, never = monotonic(), -self._silence_s
        return sorted(server for server in self._others if now - self._heard_at.get(server, never) >= self._silence_s)

    def end(self, why: DtfError) -> None:
        """The run is over before it made a step: all who ask end with the error. Returns when the other servers know,
        after DEADLINE_S at most.
        """
        with self._lock:
            self._over = why
            self._lock.wait_for(lambda: self._heard_end >= self._others, DEADLINE_S)

    def failure(self) -> str:
        """Why this attempt cannot go on; empty while it can."""
        with self._lock:
            now = monotonic()
            silent = [server for server, heard_at in self._heard_at.items() if now - heard_at > self._silence_s]
            return self._lost or (f"server {silent[0]} is gone" if silent else "")


def refuse_rendezvous(server: int) -> Callable[[bytes], bytes]:
    """The handler of MEET on a server other than server 0: it refuses every request."""

    def refuse(data: bytes) -> bytes:
        raise Refused(
            f"this is server {server}, and launcher.endpoints calls it server 0; give all processes the same "
            "endpoints, in the same order"
        )

    return refuse


class Member:
    """The part of all other processes: it asks server 0. `server`: the number of this server, or TRAINER.

    `stop_requested`: whether this server was asked to stop.
    """

    def __init__(
        self,
        transport: Transport,
        server: int,
        endpoints: Sequence[str],
        facts: dict[str, Any],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport, self._endpoints, self._stop_requested = transport, endpoints, stop_requested
        self._request = {"server": server, "born": secrets.randbits(62), "servers": len(endpoints)}
        self._schemas = meet_schemas()
        self._facts = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        self._generation, self._heard_at = "", 0.0

    def ask(self) -> tuple[bool, RendezvousInfo]:
        """Whether all servers are there, and where they meet.

        Lost, AuthError, or ConfigError for a process that cannot take part. Preempted or RendezvousTimeout where server
        0 has ended the run.
        """
        request = self._request | {"stopping": int(self._stop_requested())}
        try:
            data = self._transport.call(MEET, encode(self._schemas[0], request, {"facts": self._facts}), DEADLINE_S)
        except Refused as refused:
            raise ConfigError(str(refused)) from None
        answer = decode(self._schemas[1], data)
        if over := int(answer.scalars["over"]):
            reason = f"server 0 has ended the run: {answer.scalars['reason']}"
            raise Preempted(reason) if over == Exit.PREEMPTED else RendezvousTimeout(reason)
        return bool(answer.scalars["complete"]), RendezvousInfo(*json.loads(answer.arrays["told"].tobytes()))

    def wait_complete(self, patience_s: float, wait: Callable[[], None], say: Callable[[str], None]) -> RendezvousInfo:
        """Wait until all servers are there. RendezvousTimeout when they are not after `patience_s`.

        See `RendezvousContext` for `wait` and `say`.
        """
        start, pause, report = monotonic(), threading.Event(), WaitReport(say)
        while True:
            wait()
            try:
                complete, info = self.ask()
                if complete:
                    self._generation, self._heard_at = info.generation, monotonic()
                    return info
                why = f"server 0 waits for {named(info.missing, self._endpoints) or 'a server that was started again'}"
            except Lost as lost:
                why = f"server 0 cannot be reached: {lost}; it was not started yet, or the run has ended"
            if monotonic() - start > patience_s:
                raise RendezvousTimeout(f"the servers were not all there within launcher.timeout_s: {why}")
            report.tell(f"waiting for the servers: {why}")
            pause.wait(ASK_S)

    def failure(self, patience_s: float) -> str:
        """Why this attempt cannot go on; empty while it can, or while server 0 is silent for less than `patience_s`."""
        try:
            complete, info = self.ask()
        except Lost as lost:
            return f"server 0 is gone: {lost}" if monotonic() - self._heard_at > patience_s else ""
        self._heard_at = monotonic()
        if info.generation != self._generation:
            return "server 0 was started again"
        return "" if complete else "server 0 waits for a server that was started again"


class RunStopCheck:
    """For a trainer that was asked to stop: whether the run was, too. Then servers need it, to finish the step and
    save. `patience_s`: how much later than here signals may arrive at servers.
    """

    def __init__(self, member: Member, patience_s: float) -> None:
        self._member, self._patience_s = member, patience_s
        self._stopping, self._until, self._next = False, 0.0, 0.0

    def may_stay(self) -> bool:
        """To be called regularly from the signal on. Preempted or PeerError where server 0 has ended the run."""
        now = monotonic()
        self._until = self._until or now + self._patience_s
        if not self._stopping and now >= self._next:
            self._next = now + ASK_S
            with suppress(Lost):
                self._stopping = self._member.ask()[1].stopping
        return self._stopping or now < self._until


class LivenessMonitor:
    """A thread that calls `failure` every LOOK_S, and `fail` with a PeerError once that says that a server is lost."""

    def __init__(self, failure: Callable[[], str], fail: Callable[[BaseException], None]) -> None:
        self._failure, self._fail, self._closed = failure, fail, threading.Event()
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def close(self) -> None:
        """Stop the checks."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                failure = self._failure()
            except Exception as error:  # noqa: BLE001  the engine ends with it
                self._fail(error)
                return
            if failure:
                self._fail(PeerError(failure))
                return
