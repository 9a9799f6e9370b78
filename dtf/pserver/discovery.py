"""How manually started processes find each other: they ask server 0, by MEET, which attempt of the run this is and
where its servers meet.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from dtf.core.consistency import describe_differences
from dtf.core.errors import ConfigError, PeerError
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
"""Waiting shorter than this is not reported."""


class RendezvousTimeout(PeerError):
    """Servers did not come, or come back, within `launcher.timeout_s`."""

    patient = True


class RendezvousInfo(NamedTuple):
    """What server 0 says of this attempt of the run. Travels as a JSON list, in this order."""

    generation: str  # name of the attempt
    store: str  # where servers meet, "host:port"
    folder: str
    run_id: str
    host: str


class Coordinator:
    """Server 0's part: which servers have come, and whether they are still there.

    Threads of the service call `answer`. `silence_s`: a server that has not asked for so long is lost.
    """

    def __init__(self, info: RendezvousInfo, servers: int, facts: dict[str, Any], silence_s: float) -> None:
        self._info, self._facts, self._silence_s = info, facts, silence_s
        self._lock = threading.Lock()
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
            info = np.frombuffer(json.dumps(self._info).encode(), np.uint8)
            return encode(self._schemas[1], {"complete": int(self._complete and not self._lost)}, {"told": info})

    def complete(self) -> bool:
        """Whether all servers have come. Once true it stays true: a server that leaves later ends the attempt."""
        with self._lock:
            now = monotonic()
            self._complete = self._complete or all(
                now - self._heard_at.get(server, -self._silence_s) < self._silence_s for server in self._others
            )
            return self._complete

    def missing(self) -> list[int]:
        """Servers that have never asked."""
        with self._lock:
            return sorted(self._others - self._heard_at.keys())

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
    """The part of all other processes: it asks server 0. `server`: the number of this server, or TRAINER."""

    def __init__(self, transport: Transport, server: int, servers: int, facts: dict[str, Any]) -> None:
        self._transport = transport
        request = {"server": server, "born": secrets.randbits(62), "servers": servers}
        self._schemas = meet_schemas()
        self._request = encode(
            self._schemas[0], request, {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        )
        self._generation, self._heard_at = "", 0.0

    def ask(self) -> tuple[bool, RendezvousInfo]:
        """Whether all servers are there, and where they meet.

        Lost, AuthError, or ConfigError for a process that cannot take part.
        """
        try:
            answer = decode(self._schemas[1], self._transport.call(MEET, self._request, DEADLINE_S))
        except Refused as refused:
            raise ConfigError(str(refused)) from None
        return bool(answer.scalars["complete"]), RendezvousInfo(*json.loads(answer.arrays["told"].tobytes()))

    def wait_complete(self, patience_s: float, wait: Callable[[], None], say: Callable[[str], None]) -> RendezvousInfo:
        """Wait until all servers are there. RendezvousTimeout when they are not after `patience_s`.

        See `RendezvousContext` for `wait` and `say`.
        """
        start, pause, reported = monotonic(), threading.Event(), False
        while True:
            wait()
            try:
                complete, info = self.ask()
                if complete:
                    self._generation, self._heard_at = info.generation, monotonic()
                    return info
                why = "server 0 waits for other servers"
            except Lost as lost:
                why = f"server 0 cannot be reached: {lost}"
            waited_s = monotonic() - start
            if waited_s > patience_s:
                raise RendezvousTimeout(f"the servers were not all there within launcher.timeout_s: {why}")
            if waited_s > QUIET_S and not reported:
                say(f"waiting for the servers: {why}")
                reported = True
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
