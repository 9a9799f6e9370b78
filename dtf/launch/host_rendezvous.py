"""The launching processes of several hosts as one: they meet at node 0, agree, begin each attempt together, and hear
when one fails or falls silent.

JSON, an object a line, on one TCP connection from each host to node 0. Who connects is told nothing of the run before
it has shown that its task is the same, and, with a token, that it knows it. What passes is not encrypted, and ranks
speak with each other in torch's ways, which ask for nothing. Torch-free.

    node 0    {nonce}
    host      {nonce, node, host, task: digest, proof}
    node 0    {proof}, and {proof, differs: true} when it has another digest, to which the host says {task}; or {exit,
    message} node 0    the answer, once all are here; from then on either side says what happens, and {} as a sign of
    life
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from dtf.core.consistency import differences, digest, error_from_json, error_to_json, refusal
from dtf.core.errors import LONGEST, ConfigError, DtfError, Exit, PeerError, Preempted
from dtf.core.text import plain_text
from dtf.core.types import Failed
from dtf.host import network
from dtf.launch.exit_cause import Outcome, together

_BEAT_S = 1.0
_HELLO_S = 5.0
"""For the few lines with which a host that has connected introduces itself; and for the system to take what is sent."""
_NEWCOMERS = 64
"""That may be about to introduce themselves at once."""
_RETRY_S = 0.2
_PATIENCE_S = 5.0
"""Of waiting for a host without a word to the person who waits."""
_LINE_BYTES = 1 << 20
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Line:
    """A connection to another launching process.

    Every method raises OSError when it is lost, ValueError when what comes is no JSON.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_HELLO_S)
        self.socket, self.name, self.nonce = connection, str(connection.getpeername()[0]), secrets.token_hex(16)
        self.node: int | None = None  # not known before it has introduced itself
        self.since = self.heard = time.monotonic()
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

    def next(self, deadline: float) -> dict[str, Any]:
        """The next message; waits for it."""
        while not self.come:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            self.come += self.read()
        self.socket.settimeout(_HELLO_S)
        return self.come.popleft()


class Hosts:
    """The other hosts, as host `node` of `nodes` sees them: node 0 all of them, the others node 0. Implements
    `worker_group.Others`.

    `ranks`: of each host. A host is lost when its connection is, or when it has been silent for `silence_s`. `token`: a
    secret that all hosts know, or none.
    """

    def __init__(
        self, node: int, nodes: int, ranks: int, address: tuple[str, int], silence_s: float,
        note: Callable[[str], None], token: str = ""
    ) -> None:  # fmt: skip
        self.node, self.nodes, self._ranks, self._address, self._silence_s, self._note, self._token = (
            node,
            nodes,
            ranks,
            address,
            silence_s,
            note,
            token,
        )
        self._where = network.endpoint_text(*address)
        self.failed: Failed | None = None
        self._lines: dict[int, Line] = {}
        self._newcomers: list[Line] = []
        self._answer: dict[str, Any] | None = None
        self._ended: dict[int, Outcome] = {}
        self._running = False  # node 0: an attempt is under way
        self._inbox: deque[dict[str, Any]] = deque()
        self._selector = selectors.DefaultSelector()
        self._beaten = 0.0
        self._listener: socket.socket | None = None

    def close(self) -> None:
        for line in [*self._lines.values(), *self._newcomers]:
            line.socket.close()
        if self._listener:
            self._listener.close()
        self._selector.close()

    # ------------------------------------------------------------ meeting: node 0

    def lead(self, task: dict[str, Any], timeout_s: float, make: Callable[[], dict[str, Any]]) -> None:
        """Node 0: wait for all hosts, compare their tasks with this one, and tell them the answer that `make` gives
        once all agree.

        What `make` raises, and a ConfigError that names the host that differs, is raised on every host.
        """
        try:
            self._listener = network.listen(*self._address)
        except OSError as error:
            raise ConfigError(
                f"launcher.address={self._where}: node 0 cannot listen there: {error.strerror or error}; give an "
                "address of its host and a free port"
            ) from error
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._task = task
        try:
            self.complete(timeout_s)
            self._answer = make()
        except DtfError as error:
            self._answer = error_to_json(error)
            raise
        finally:
            self.tell(self._answer or error_to_json(PeerError("node 0 was stopped before the run began")))

    def complete(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Node 0: wait for each host that is not here, at first or because it was lost.

        PeerError when one does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        told = time.monotonic() + _PATIENCE_S
        while len(self._lines) < self.nodes - 1:
            missing = ", ".join(str(node) for node in range(1, self.nodes) if node not in self._lines)
            if stopped():
                raise Preempted(
                    f"asked to stop while waiting for host {missing}; start again with the same run.dir to go on from "
                    "the last checkpoint"
                )
            if time.monotonic() > deadline:
                raise PeerError(
                    f"host {missing} did not come to launcher.address within {timeout_s:g} s; see job=doctor"
                )
            if told and time.monotonic() > told:
                self._note(f"waiting for host {missing} to come to {self._where}")
                told = 0.0
            self.listen()

    def _accept(self) -> None:
        """Somebody has connected: a host, or a stranger, who is forgotten unless it introduces itself soon."""
        with contextlib.suppress(OSError):  # it went away, or this process has no file left for it
            assert self._listener
            connection, _ = self._listener.accept()
            if len(self._newcomers) >= _NEWCOMERS:
                self._lose(self._newcomers[0], "")
            line = Line(connection)
            self._newcomers.append(line)
            self._selector.register(connection, selectors.EVENT_READ, line)
            line.send({"nonce": line.nonce})

    def _meet(self, line: Line, said: dict[str, Any]) -> None:
        """Hear who has connected; take it in, or turn it away."""
        if line.node is None:
            line.node, line.name = int(said["node"]), plain_text(str(said["host"]), 100)
            theirs, same = str(said["nonce"]), said["task"] == digest(self._task)
            if not _equal(said["proof"], _proof(self._token, line.nonce, theirs, "host")):
                self._turn_away(
                    line,
                    f"DTF_TOKEN of host {line.name} is not that of host 0; give all hosts the same, or none",
                    fatal=False,
                )
            line.send({"proof": _proof(self._token, theirs, line.nonce, "node 0"), "differs": not same})
            if not same:
                return
        else:
            found = list(differences(self._task, said["task"], "host 0"))
            keys = ", ".join(each.partition("=")[0] for each in found)
            told = f"host {line.name} differs from host 0 in {keys}; host 0 says how"
            self._turn_away(line, str(refusal(f"host {line.name}", "host 0", "; ".join(found))), told)
        node, before = line.node, self._lines.get(line.node)
        if before and before.name == line.name:  # started again, and host 0 has not noticed yet that it was gone
            with contextlib.suppress(OSError):
                before.send(
                    error_to_json(
                        ConfigError(
                            f"host {line.name} was started once more with launcher.node_rank={node}, which takes the "
                            "place of this one"
                        )
                    )
                )
            self._lose(before, "was started once more")
        elif before or node not in range(1, self.nodes):
            held = f", as {before.name} does" if before else ""
            self._turn_away(
                line,
                f"host {line.name} says launcher.node_rank={node}{held}; give each host its own, 0 to {self.nodes - 1}",
            )
        if self._answer:  # the run is under way
            line.send(self._answer)
        self._newcomers.remove(line)
        self._add(line)

    def _turn_away(self, line: Line, why: str, told: str = "", fatal: bool = True) -> NoReturn:
        """Say why, or what of it this one may know.

        Raises it for all while the run has not begun, if `fatal`; else the wrong host harms itself alone.
        """
        why = plain_text(why, LONGEST)
        line.send(error_to_json(ConfigError(plain_text(told or why, LONGEST))))
        if fatal and not self._answer:
            self._lose(line, "")
            raise ConfigError(why)
        self._note(f"turned away: {why}")
        raise ConnectionAbortedError

    # ------------------------------------------------------------ meeting: the others

    def follow(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Other hosts: come to node 0 and return its answer, which comes when all are there.

        Raises what it says is wrong.
        """
        deadline = time.monotonic() + timeout_s
        told = time.monotonic() + _PATIENCE_S
        while not self._inbox:
            try:
                if 0 in self._lines:
                    self.listen()
                else:
                    self._introduce(task, deadline)
            except socket.gaierror as error:
                raise ConfigError(
                    f"launcher.address={self._where}: this host knows no address of that name: {error.strerror}; see "
                    "job=doctor"
                ) from error
            except _MALFORMED as error:
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"host 0 did not answer at launcher.address={self._where} within {timeout_s:g} s: {error}; "
                        "see job=doctor"
                    ) from error
                if told and time.monotonic() > told:
                    self._note(f"waiting for host 0 at {self._where} ({error})")
                    told = 0.0
                time.sleep(_RETRY_S)
        return self.next(lambda: True)

    def _introduce(self, task: dict[str, Any], deadline: float) -> None:
        """Connect, and say who this is; the task itself only where its digest differs, so that node 0 can say in
        what.
        """
        line = Line(socket.create_connection(self._address, timeout=max(0.1, deadline - time.monotonic())))
        with contextlib.ExitStack() as stack:
            stack.callback(line.socket.close)
            nonce = str(line.next(deadline)["nonce"])
            me = {"node": self.node, "host": socket.gethostname(), "task": digest(task)}
            line.send({"nonce": line.nonce, **me, "proof": _proof(self._token, nonce, line.nonce, "host")})
            said = line.next(deadline)
            if "exit" not in said and not _equal(said["proof"], _proof(self._token, line.nonce, nonce, "node 0")):
                raise ConfigError(
                    f"who answers at launcher.address={self._where} does not know DTF_TOKEN; is it host 0 of this run?"
                )
            if said.get("differs"):
                line.send({"task": task})
                said = line.next(deadline)
            if "exit" in said:
                raise error_from_json(said)
            stack.pop_all()
        line.node = 0
        self._selector.register(line.socket, selectors.EVENT_READ, line)
        self._add(line)

    def _add(self, line: Line) -> None:
        assert line.node is not None
        self._lines[line.node] = line
        # it was lost between two attempts, and is here again
        if not self._running and self._ended.pop(line.node, None):
            self.failed = next((each.cause for each in self._ended.values() if each.failed), None)
        while line.come:  # its first words may follow closely
            self._take(line.node, line.come.popleft())

    # ------------------------------------------------------------ attempts

    def begin(self, number: int, store: str) -> None:
        """An attempt begins here; from node 0 it begins everywhere."""
        if self.node:
            self.failed = None
        else:  # what was heard since the last attempt counts in this one
            self._running = True
            self.tell({"begin": number, "store": store})

    def settle(self, mine: Outcome) -> Outcome:
        """This host's attempt has ended, or cannot begin. On node 0: wait for the others; the outcome of all.

        Elsewhere: `mine`, and node 0 knows it.
        """
        if self.node:
            self.tell({"ended": mine.to_json()})
            return mine
        self._end(0, mine)
        while len(self._ended) < self.nodes:
            self.listen()
        outcomes = [self._ended[node] for node in sorted(self._ended)]
        self.failed, self._ended, self._running = None, {}, False
        return together(outcomes)

    def next(self, patience: Callable[[], bool]) -> dict[str, Any]:
        """Other hosts: node 0's next word, `{"begin", "store"}` or `{"end"}`. PeerError when it is lost, or when
        `patience` is at an end.

        Raises what node 0 says has gone wrong for all before the run began, or for this host alone.
        """
        while not self._inbox:
            if 0 not in self._lines or not patience():
                raise PeerError(
                    f"{self.failed.message if self.failed else 'host 0 says nothing'}; start again with the same "
                    "run.dir to go on"
                )
            self.listen()
        said = self._inbox.popleft()
        if "exit" in said:
            raise error_from_json(said)
        return said

    def listen(self) -> None:
        """Wait a moment for something to be said."""
        self._selector.select(_RETRY_S)
        self.tick()

    def tell(self, message: dict[str, Any]) -> None:
        """Say it to every host that this one is connected with."""
        for line in list(self._lines.values()):
            try:
                line.send(message)
            except OSError as error:
                self._lose(line, f"cannot be reached any more ({error})")

    def fileno(self) -> int:
        return self._selector.fileno()

    def hear(self) -> None:
        """Take what has come, without waiting."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _read(self, line: Line) -> None:
        try:
            for message in line.read():
                if line in self._newcomers:
                    self._meet(line, message)
                elif line.node is not None:
                    self._take(line.node, message)
        except _MALFORMED as error:
            self._lose(line, f"is gone ({error})")

    def tick(self) -> None:
        """Hear the others, notice the silent, and give a sign of life."""
        self.hear()
        now = time.monotonic()
        for line in list(self._lines.values()):
            if now - line.heard > self._silence_s:
                self._lose(
                    line,
                    f"has said nothing for launcher.hang_timeout_s={self._silence_s:g}: stopped, or the network is cut",
                )
        for line in list(self._newcomers):
            if now - line.since > _HELLO_S:
                self._lose(line, "")
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

    def _lose(self, line: Line, how: str) -> None:
        """Close a connection. The host behind it, once taken in, has failed."""
        if line.socket.fileno() < 0:
            return
        self._selector.unregister(line.socket)
        line.socket.close()
        if line in self._newcomers or line.node is None:
            self._newcomers.remove(line)
            return
        del self._lines[line.node]
        cause = Failed(line.node * self._ranks, 0, int(Exit.PEER), f"host {line.node} ({line.name}) {how}", "")
        if line.node not in self._ended:
            self._end(line.node, Outcome(Exit.PEER, cause, external=True))


def _proof(token: str, *words: str) -> str:
    """Shows who knows `token` that the other side does too, and to nobody what it is. Empty without one."""
    return hmac.digest(os.fsencode(token), json.dumps(words).encode(), "sha256").hex() if token else ""


def _equal(found: object, proof: str) -> bool:
    return hmac.compare_digest(str(found).encode(), proof.encode())
