"""The launching processes of several hosts as one: they meet at node 0, agree, begin each attempt together, and hear when one fails or falls silent.

JSON, an object a line, on one TCP connection from each host to node 0. Nothing here asks for a password, so the network must be one that no stranger
reaches, as for torch.distributed itself. Torch-free; what ranks say to each other does not come this way.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dtf import network
from dtf.agreement import differences, from_answer, refusal, to_answer
from dtf.ending import Outcome, together
from dtf.errors import ConfigError, DtfError, Exit, PeerError, Preempted
from dtf.values import Failed

_BEAT_S = 1.0
_HELLO_S = 20.0
"""For the few lines with which a host that has connected introduces itself; a stranger that says nothing holds up nobody for longer."""
_RETRY_S = 0.2
_PATIENCE_S = 5.0
"""Of waiting for a host without a word to the person who waits."""
_LINE_BYTES = 1 << 20
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Line:
    """A connection to another launching process. Every method raises OSError when it is lost, ValueError when what comes is no JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_HELLO_S)
        self.socket, self.heard, self.name = connection, time.monotonic(), str(connection.getpeername()[0])
        self.come: deque[dict[str, Any]] = deque()  # read and not yet taken by `next`
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """Messages that have come; waits when nothing has."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the connection was closed")
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            raise ValueError("a line without end")
        return [json.loads(line) for line in lines]

    def next(self, timeout_s: float) -> dict[str, Any]:
        """The next message; waits for it."""
        ends = time.monotonic() + timeout_s
        while not self.come:
            self.socket.settimeout(max(0.001, ends - time.monotonic()))  # of the whole message: a stranger may drip
            self.come += self.read()
        self.socket.settimeout(_HELLO_S)
        return self.come.popleft()


class Hosts:
    """The other hosts, as host `node` of `nodes` sees them: node 0 all of them, the others node 0. Implements `attempt.Others`.

    `ranks`: of each host. A host is lost when its connection is, or when it has been silent for `silence_s`.
    """

    def __init__(self, node: int, nodes: int, ranks: int, address: tuple[str, int], silence_s: float, note: Callable[[str], None]) -> None:
        self.node, self.nodes, self._ranks, self._address, self._silence_s, self._note = node, nodes, ranks, address, silence_s, note
        self.failed: Failed | None = None
        self._lines: dict[int, Line] = {}
        self._ended: dict[int, Outcome] = {}
        self._inbox: deque[dict[str, Any]] = deque()
        self._selector = selectors.DefaultSelector()
        self._beaten = 0.0
        self._listener: socket.socket | None = None

    def close(self) -> None:
        for line in self._lines.values():
            line.socket.close()
        if self._listener:
            self._listener.close()
        self._selector.close()

    # ------------------------------------------------------------ meeting

    def lead(self, task: dict[str, Any], timeout_s: float, make: Callable[[], dict[str, Any]]) -> None:
        """Node 0: wait for all hosts, compare their tasks with this one, and tell them the answer that `make` gives once all agree.

        What `make` raises, and a ConfigError that names the host that differs, is raised on every host.
        """
        host, port = self._address
        try:
            self._listener = network.listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"launcher.address={host}:{port}: node 0 cannot listen there: {error.strerror or error}; give an address of its host and a free port"
            ) from error
        self._task = task
        self._answer: dict[str, Any] | None = None
        try:
            self.complete(timeout_s)
            self._answer = make()
        except DtfError as error:
            self._answer = to_answer(error)
            raise
        finally:
            self.tell(self._answer or to_answer(PeerError("node 0 was stopped before the run began")))

    def complete(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Node 0: take in each host that is not here, at first or because it was lost. PeerError when one does not come in time."""
        assert self._listener is not None
        deadline = time.monotonic() + timeout_s
        self._listener.settimeout(_RETRY_S)
        told = time.monotonic() + _PATIENCE_S
        while len(self._lines) < self.nodes - 1:
            missing = ", ".join(str(node) for node in range(1, self.nodes) if node not in self._lines)
            if stopped():
                raise Preempted(f"asked to stop while waiting for host {missing}; start again with the same run.dir to go on from the last checkpoint")
            if time.monotonic() > deadline:
                raise PeerError(f"host {missing} did not come to launcher.address within {timeout_s:g} s; see job=doctor")
            if told and time.monotonic() > told:
                self._note(f"waiting for host {missing} to come to {self._address[0]}:{self._address[1]}")
                told = 0.0
            self.tick()
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        """Hear who has connected; a stranger, or one that goes away, is forgotten."""
        try:
            line = Line(connection)
            hello = line.next(_HELLO_S)
            node, line.name = int(hello["node"]), str(hello["host"])[:100]
            line.send({"task": self._task})
            wrong = str(line.next(_HELLO_S)["differs"])
            before = self._lines.get(node)
            if not wrong and (node not in range(1, self.nodes) or before):
                held = f", as {before.name} does" if before else ""
                wrong = f"it says launcher.node_rank={node}{held}; give each host its own, 0 to {self.nodes - 1}"
            if wrong:
                error = refusal(f"host {line.name}", "host 0", wrong)
                line.send(to_answer(error))
                connection.close()
                raise error
            if self._answer:  # the run is under way
                line.send(self._answer)
            self._add(node, line)
        except _MALFORMED:
            connection.close()

    def follow(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Other hosts: come to node 0, say how this host's task differs, and return its answer. Raises what it says is wrong."""
        host, port = self._address
        where, deadline = f"launcher.address={host}:{port}", time.monotonic() + timeout_s
        told = time.monotonic() + _PATIENCE_S
        while True:
            try:
                line = Line(socket.create_connection(self._address, timeout=max(0.1, deadline - time.monotonic())))
                line.send({"node": self.node, "host": socket.gethostname()})
                expected = line.next(max(0.1, deadline - time.monotonic()))["task"]
                line.send({"differs": "; ".join(differences(expected, task, "host 0"))})
                answer = line.next(max(0.1, deadline - time.monotonic()))
                break
            except socket.gaierror as error:
                raise ConfigError(f"{where}: this host knows no address of that name: {error.strerror}; see job=doctor") from error
            except _MALFORMED as error:
                if time.monotonic() > deadline:
                    raise PeerError(f"host 0 did not answer at {where} within {timeout_s:g} s: {error}; see job=doctor") from error
                if told and time.monotonic() > told:
                    self._note(f"waiting for host 0 at {host}:{port} ({error})")
                    told = 0.0
                time.sleep(_RETRY_S)
        if "exit" in answer:
            raise from_answer(answer)
        self._add(0, line)
        return answer

    def _add(self, node: int, line: Line) -> None:
        self._lines[node] = line
        if self._ended.pop(node, None):  # it was lost between two attempts, and is here again
            self.failed = next((each.cause for each in self._ended.values() if each.failed), None)
        self._selector.register(line.socket, selectors.EVENT_READ, node)
        while line.come:  # the first words of a run may follow the answer closely
            self._take(node, line.come.popleft())

    # ------------------------------------------------------------ attempts

    def begin(self, number: int, store: str) -> None:
        """An attempt begins here; from node 0 it begins everywhere."""
        if self.node:
            self.failed = None
        else:  # what was heard since the last attempt counts in this one
            self.tell({"begin": number, "store": store})

    def settle(self, mine: Outcome) -> Outcome:
        """This host's attempt has ended, or cannot begin. On node 0: wait for the others; the outcome of all. Elsewhere: `mine`, and node 0 knows it."""
        if self.node:
            self.tell({"ended": mine.to_json()})
            return mine
        self._end(0, mine)
        while len(self._ended) < self.nodes:
            self.listen()
        outcomes = [self._ended[node] for node in sorted(self._ended)]
        self.failed, self._ended = None, {}
        return together(outcomes)

    def next(self, patience: Callable[[], bool]) -> dict[str, Any]:
        """Other hosts: node 0's next word, `{"begin", "store"}` or `{"end"}`. PeerError when it is lost, or when `patience` is at an end."""
        while not self._inbox:
            if 0 not in self._lines or not patience():
                raise PeerError(f"{self.failed.message if self.failed else 'host 0 says nothing'}; start again with the same run.dir to go on")
            self.listen()
        return self._inbox.popleft()

    def listen(self) -> None:
        """Wait a moment for something to be said."""
        self._selector.select(_RETRY_S)
        self.tick()

    def tell(self, message: dict[str, Any]) -> None:
        """Say it to every host that this one is connected with."""
        for node, line in list(self._lines.items()):
            try:
                line.send(message)
            except OSError as error:
                self._lose(node, f"cannot be reached any more ({error})")

    def fileno(self) -> int:
        return self._selector.fileno()

    def hear(self) -> None:
        """Take what has come, without waiting."""
        for key, _ in self._selector.select(0):
            try:
                for message in self._lines[key.data].read():
                    self._take(key.data, message)
            except _MALFORMED as error:
                self._lose(key.data, f"is gone ({error})")

    def tick(self) -> None:
        """Hear the others, notice the silent, and give a sign of life."""
        self.hear()
        now = time.monotonic()
        for node, line in list(self._lines.items()):
            if now - line.heard > self._silence_s:
                self._lose(node, f"has said nothing for launcher.hang_timeout_s={self._silence_s:g}: stopped, or the network is cut")
        if now - self._beaten > min(_BEAT_S, self._silence_s / 4):
            self._beaten = now
            self.tell({})

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "ended" in message and self.node == 0:
            self._end(node, Outcome.from_json(message["ended"]))
        elif "abort" in message:
            self.failed = Failed(**message["abort"])
        elif message:
            self._inbox.append(message)

    def _end(self, node: int, outcome: Outcome) -> None:
        self._ended[node] = outcome
        if outcome.failed and outcome.cause:
            self._fail(outcome.cause)

    def _fail(self, cause: Failed) -> None:
        if not self.failed:
            self.failed = cause
            if self.node == 0:
                self.tell({"abort": asdict(cause)})

    def _lose(self, node: int, how: str) -> None:
        line = self._lines.pop(node, None)
        if line is None:
            return
        self._selector.unregister(line.socket)
        line.socket.close()
        cause = Failed(node * self._ranks, 0, int(Exit.PEER), f"host {node} ({line.name}) {how}", "")
        if node not in self._ended:
            self._end(node, Outcome(Exit.PEER, cause, external=True))
