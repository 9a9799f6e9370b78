"""A connection between the launching processes of two hosts: JSON, an object a line, and who may be trusted."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections import deque
from typing import Any

from dtf.core.errors import ConfigError
from dtf.host.network import endpoint_text

HELLO_S = 5.0
"""For the few messages with which a host that has connected introduces itself; and for the system to take what is sent.
"""
_LINE_BYTES = 1 << 20


class Connection:
    """A connection to another launching process.

    Every method raises OSError when the connection is lost, ValueError when what arrives is no JSON.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(HELLO_S)
        self.socket, self.name, self.nonce = connection, str(connection.getpeername()[0]), secrets.token_hex(16)
        self.node: int | None = None  # of the other side; None before it has introduced itself
        self.since = self.received_at = time.monotonic()
        self.received: deque[dict[str, Any]] = deque()  # read, and not yet taken by `next_message`
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived; waits when there is none."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the connection was closed")
        self.received_at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            raise ValueError("a line without end")
        return [json.loads(line) for line in lines]

    def next_message(self, deadline: float) -> dict[str, Any]:
        """The next message; waits for it until `deadline`, on the monotonic clock."""
        while not self.received:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            self.received += self.read()
        self.socket.settimeout(HELLO_S)
        return self.received.popleft()


def introduce(connection: Connection, node: int, token: str, said: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Tell node 0 who this host is, and `said` besides. Returns its answer; `{exit, message}` where it turns this host
    away. ConfigError when it does not know the token.
    """
    nonce = str(connection.next_message(deadline)["nonce"])
    shown = proof(token, nonce, connection.nonce, "host")
    this_host = {"node": node, "host": socket.gethostname(), "proof": shown, **said}
    connection.send({"nonce": connection.nonce, **this_host})
    answer = connection.next_message(deadline)
    if "exit" not in answer and not equal(answer["proof"], proof(token, connection.nonce, nonce, "node 0")):
        where = endpoint_text(*connection.socket.getpeername()[:2])
        raise ConfigError(f"who answers at launcher.address={where} does not know DTF_TOKEN; is it host 0 of this run?")
    return answer


def proof(token: str, *words: str) -> str:
    """What only a process that knows `token` can compute from these words; it does not reveal the token.

    Empty without a token.
    """
    return hmac.digest(os.fsencode(token), json.dumps(words).encode(), "sha256").hex() if token else ""


def equal(received: object, expected: str) -> bool:
    """Whether two proofs are the same, in a time that does not depend on where they differ."""
    return hmac.compare_digest(str(received).encode(), expected.encode())
