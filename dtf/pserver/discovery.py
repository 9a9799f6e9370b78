"""How processes that were started by hand find each other: they ask server 0, by MEET, which attempt of the run this is
and where its servers meet.
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
from dtf.pserver.net.messages import MEET, facts_of, meet_schemas
from dtf.pserver.net.transport import Lost, Refused, Transport

NOBODY = -1
"""In the place of a server's number: a trainer asks."""

ASK_S, DEADLINE_S = 0.25, 5.0
"""Between two questions while waiting, and how long an answer may take."""

LOOK_S = 1.0
"""Between two looks at whether the other servers are there."""

QUIET_S = 3.0
"""Waiting that needs no words."""


class Absent(PeerError):
    """Servers did not come, or come back, though they were waited for as long as the config says."""

    patient = True


class Told(NamedTuple):
    """What server 0 says of this attempt of the run."""

    epoch: str
    store: str  # where servers meet, "host:port"
    folder: str
    run_id: str
    host: str


class Host:
    """Server 0's part: who has come, and whether they are still there. Threads of the service call `meet`."""

    def __init__(self, told: Told, servers: int, facts: dict[str, Any], silence_s: float) -> None:
        self._told, self._facts, self._silence_s = told, facts, silence_s
        self._lock = threading.Lock()
        self._others = set(range(1, servers))
        self._born: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._complete = not self._others
        self._lost = ""
        self._schemas = meet_schemas()

    def meet(self, data: bytes) -> bytes:
        """Tell a process where it is; servers say again and again that they are there."""
        message = decode(self._schemas[0], data)
        server, born, servers = (int(message.scalars[name]) for name in ("server", "born", "servers"))
        if servers != len(self._others) + 1:
            raise Refused(f"strategy.endpoints names {servers} server(s), and {len(self._others) + 1} for server 0")
        if server != NOBODY and server not in self._others:
            raise Refused(f"strategy.server_id={server} is none of 1 to {len(self._others)}")
        refusal = describe_differences({"server 0": self._facts, "this process": facts_of(message)})
        if refusal:
            raise Refused(refusal)
        with self._lock:
            if server != NOBODY:
                if self._complete and self._born[server] != born:
                    self._lost = self._lost or f"server {server} was started again"
                self._born[server], self._heard[server] = born, monotonic()
            told = np.frombuffer(json.dumps(self._told).encode(), np.uint8)
            return encode(self._schemas[1], {"complete": int(self._complete and not self._lost)}, {"told": told})

    def complete(self) -> bool:
        """Whether all have come; from then on none may leave."""
        with self._lock:
            now = monotonic()
            self._complete = self._complete or all(
                now - self._heard.get(server, -self._silence_s) < self._silence_s for server in self._others
            )
            return self._complete

    def missing(self) -> list[int]:
        """Servers that have not come."""
        with self._lock:
            return sorted(self._others - self._heard.keys())

    def look(self) -> str:
        """Why this attempt cannot go on, or nothing."""
        with self._lock:
            silent = [server for server, heard in self._heard.items() if monotonic() - heard > self._silence_s]
            return self._lost or (f"server {silent[0]} is gone" if silent else "")


def not_here(server: int) -> Callable[[bytes], bytes]:
    """What another server than 0 says to those who ask it."""

    def refuse(data: bytes) -> bytes:
        raise Refused(
            f"this is server {server}, and strategy.endpoints calls it server 0; give all processes the same "
            "endpoints, in the same order"
        )

    return refuse


class Guest:
    """The part of all others: asks server 0. `who`: the number of a server, or NOBODY."""

    def __init__(self, transport: Transport, who: int, servers: int, facts: dict[str, Any]) -> None:
        self._transport = transport
        request = {"server": who, "born": secrets.randbits(62), "servers": servers}
        self._schemas = meet_schemas()
        self._request = encode(
            self._schemas[0], request, {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        )
        self._epoch, self._heard = "", 0.0

    def ask(self) -> tuple[bool, Told]:
        """Whether all servers are there, and where.

        Lost, AuthError, or ConfigError for a process that cannot take part.
        """
        try:
            answer = decode(self._schemas[1], self._transport.call(MEET, self._request, DEADLINE_S))
        except Refused as refused:
            raise ConfigError(str(refused)) from None
        return bool(answer.scalars["complete"]), Told(*json.loads(answer.arrays["told"].tobytes()))

    def arrive(self, patience_s: float, wait: Callable[[], None], say: Callable[[str], None]) -> Told:
        """Wait until all servers are there. Absent when they are not after `patience_s`.

        See `Standing` for `wait` and `say`.
        """
        start, pause, said = monotonic(), threading.Event(), False
        while True:
            wait()
            try:
                complete, told = self.ask()
                if complete:
                    self._epoch, self._heard = told.epoch, monotonic()
                    return told
                why = "server 0 waits for other servers"
            except Lost as lost:
                why = f"server 0 cannot be reached: {lost}"
            waited = monotonic() - start
            if waited > patience_s:
                raise Absent(f"the servers were not all there within strategy.meet_timeout_s: {why}")
            if waited > QUIET_S and not said:
                say(f"waiting for the servers: {why}")
                said = True
            pause.wait(ASK_S)

    def look(self, patience_s: float) -> str:
        """Why this attempt cannot go on, or nothing."""
        try:
            complete, told = self.ask()
        except Lost as lost:
            return f"server 0 is gone: {lost}" if monotonic() - self._heard > patience_s else ""
        self._heard = monotonic()
        if told.epoch != self._epoch:
            return "server 0 was started again"
        return "" if complete else "server 0 waits for a server that was started again"


class Watch:
    """A thread that looks at the others until one is missed."""

    def __init__(self, look: Callable[[], str], fail: Callable[[BaseException], None]) -> None:
        self._look, self._fail, self._closed = look, fail, threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                lost = self._look()
            except Exception as error:  # noqa: BLE001  the engine ends with it
                self._fail(error)
                return
            if lost:
                self._fail(PeerError(lost))
                return
