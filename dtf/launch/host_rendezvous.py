"""The rendezvous of the launching processes of several hosts. Node 0 is the leader, the others are followers.

They agree on the task, begin each attempt together, and learn when a host fails or falls silent. Each follower has one
TCP connection to node 0. Messages are JSON, an object a line:

    node 0    {nonce}
    host      {nonce, node, host, task: digest, proof}
    node 0    {proof, differs}; or {exit, message} to a host that is turned away
    host      {task}, when its digest differs: node 0 names the keys in {exit, message}, or answers {}
              (with an empty digest it asks which job this is: node 0 answers {proof, job}, and that is all)
    node 0    the answer, once all hosts are here

From then on either side reports what happens, and sends {} as a sign of life. A process that connects learns nothing
of the run before it has shown that it has the same task, and, with a token, that it knows the token. Messages are not
encrypted, and torch's own connections between ranks authenticate nobody. Torch-free.
"""

from __future__ import annotations

import contextlib
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
from dtf.host.signals import Stop
from dtf.launch.exit_cause import GroupResult, combine_hosts
from dtf.launch.host_connection import HELLO_S, Connection, equal, introduce, proof

_BEAT_S, _RETRY_S = 1.0, 0.2
_NEWCOMERS = 64
"""Connections that may be open at once without having introduced themselves."""
_PATIENCE_S = 5.0
"""Seconds of waiting for a host before a note says so."""
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class HostRendezvous:
    """The other hosts, as host `node` of `nodes` sees them. Implements `rank_handle.OtherHosts`.

    `ranks`: on each host. `address`: host and port of node 0. A host is lost when its connection is, or when it was
    silent for `silence_s`. `note`: gets messages for the user. `token`: a secret that all hosts know, or empty.
    """

    def __init__(
        self, node: int, nodes: int, ranks: int, address: tuple[str, int], silence_s: float,
        note: Callable[[str], None], token: str = ""
    ) -> None:  # fmt: skip
        self.node, self.nodes, self._ranks, self._address = node, nodes, ranks, address
        self._silence_s, self._note, self._token = silence_s, note, token
        self._where = network.endpoint_text(*address)
        self.failed: Failed | None = None
        self._connections: dict[int, Connection] = {}
        self._newcomers: list[Connection] = []
        self._answer: dict[str, Any] | None = None
        self._ended: dict[int, GroupResult] = {}
        self._running = False  # node 0: an attempt is under way
        self._inbox: deque[dict[str, Any]] = deque()
        self._selector = selectors.DefaultSelector()
        self._beaten = 0.0
        self._listener: socket.socket | None = None
        self.stop: Stop | None = None  # of this host: a run that one host is asked to stop, stops on all
        self._told_stop = False

    def close(self) -> None:
        for connection in [*self._connections.values(), *self._newcomers]:
            connection.socket.close()
        if self._listener:
            self._listener.close()
        self._selector.close()

    def join_as_leader(self, task: dict[str, Any], timeout_s: float, make: Callable[[], dict[str, Any]]) -> None:
        """Node 0: wait for all hosts, check that they have this task, and send them what `make` returns.

        Collective over the hosts. An error of `make` is raised on every host; so is a ConfigError that names the host
        whose task differs, and in what.
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
            self.wait_for_hosts(timeout_s)
            self._answer = make()
        except DtfError as error:
            self._answer = error_to_json(error)
            raise
        finally:
            self.broadcast(self._answer or error_to_json(PeerError("node 0 was stopped before the run began")))

    def wait_for_hosts(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Node 0: wait for each host that is not connected, at first or because it was lost.

        PeerError when one does not come in time, Preempted once `stopped()`.
        """
        deadline = time.monotonic() + timeout_s
        note_at = time.monotonic() + _PATIENCE_S
        while len(self._connections) < self.nodes - 1:
            missing = ", ".join(str(node) for node in range(1, self.nodes) if node not in self._connections)
            if stopped():
                raise Preempted(
                    f"asked to stop while waiting for host {missing}; start again with the same run.dir to go on from "
                    "the last checkpoint"
                )
            if time.monotonic() > deadline:
                raise PeerError(
                    f"host {missing} did not come to launcher.address within {timeout_s:g} s; see job=doctor"
                )
            if note_at and time.monotonic() > note_at:
                self._note(f"waiting for host {missing} to come to {self._where}")
                note_at = 0.0
            self.wait_briefly()

    def _accept(self) -> None:
        """Accept a connection. It is closed unless it introduces itself within `HELLO_S`."""
        with contextlib.suppress(OSError):  # it went away, or this process has no file left for it
            assert self._listener
            accepted, _ = self._listener.accept()
            if len(self._newcomers) >= _NEWCOMERS:
                self._lose(self._newcomers[0], "")
            connection = Connection(accepted)
            self._newcomers.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            connection.send({"nonce": connection.nonce})

    def _admit(self, connection: Connection, message: dict[str, Any]) -> None:
        """Node 0: handle what a new connection says of itself; add the host, or turn it away."""
        if connection.node is None:
            connection.node, connection.name = int(message["node"]), plain_text(str(message["host"]), 100)
            nonce, same = str(message["nonce"]), message["task"] == digest(self._task)
            if not equal(message["proof"], proof(self._token, connection.nonce, nonce, "host")):
                self._turn_away(
                    connection,
                    f"DTF_TOKEN of host {connection.name} is not that of host 0; give all hosts the same, or none",
                    fatal=False,
                )
            own = {"proof": proof(self._token, nonce, connection.nonce, "node 0")}
            if message["task"] == "":  # it asks which job it is to take part in, see `host_job.py`
                connection.send({**own, "job": self._task["config"]["job"]["name"]})
                raise ConnectionAbortedError
            connection.send({**own, "differs": not same})
            if not same:
                return
        else:
            wrong = list(differences(self._task, message["task"], "host 0"))
            if wrong:
                keys, name = ", ".join(text.partition("=")[0] for text in wrong), f"host {connection.name}"
                short = f"{name} differs from host 0 in {keys}; host 0 says how"
                self._turn_away(connection, str(refusal(name, "host 0", "; ".join(wrong))), short)
            connection.send({})  # one side has loaded files of code that the other has not
        node, before = connection.node, self._connections.get(connection.node)
        if before and before.name == connection.name:  # started again, and host 0 has not noticed yet that it was gone
            with contextlib.suppress(OSError):
                before.send(
                    error_to_json(
                        ConfigError(
                            f"host {connection.name} was started once more with launcher.node_rank={node}, which "
                            "takes the place of this one"
                        )
                    )
                )
            self._lose(before, "was started once more")
        elif before or node not in range(1, self.nodes):
            held = f", as {before.name} does" if before else ""
            self._turn_away(
                connection,
                f"host {connection.name} says launcher.node_rank={node}{held}; give each host its own, 0 to "
                f"{self.nodes - 1}",
            )
        if self._answer:  # the run is under way
            connection.send(self._answer)
        self._newcomers.remove(connection)
        self._add(connection)

    def _turn_away(self, connection: Connection, why: str, short: str = "", fatal: bool = True) -> NoReturn:
        """Refuse a host: send it the reason, or `short` where it may not know all of it.

        Raises ConfigError, which ends all hosts, if `fatal` and the run has not begun; otherwise only this connection
        is closed.
        """
        why = plain_text(why, LONGEST)
        connection.send(error_to_json(ConfigError(plain_text(short or why, LONGEST))))
        if fatal and not self._answer:
            self._lose(connection, "")
            raise ConfigError(why)
        self._note(f"turned away: {why}")
        raise ConnectionAbortedError

    # ------------------------------------------------------------ meeting: the others

    def join_as_follower(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Other hosts: connect to node 0 and return its answer, which arrives when all hosts are there.

        Collective over the hosts. Raises the error that node 0 sends; PeerError when it does not answer in time.
        """
        deadline, known = time.monotonic() + timeout_s, False
        note_at = time.monotonic() + _PATIENCE_S
        while not self._inbox:
            try:
                if 0 in self._connections:
                    self.wait_briefly()
                else:
                    self._introduce(task, deadline)
            except _MALFORMED as error:
                if isinstance(error, socket.gaierror) and not known:
                    raise ConfigError(
                        f"launcher.address={self._where}: this host knows no address of that name: {error.strerror}; "
                        "see job=doctor"
                    ) from error
                known = True  # a name that was known comes back with its host
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"host 0 did not answer at launcher.address={self._where} within {timeout_s:g} s: {error}; "
                        "see job=doctor"
                    ) from error
                if note_at and time.monotonic() > note_at:
                    self._note(f"waiting for host 0 at {self._where} ({error})")
                    note_at = 0.0
                time.sleep(_RETRY_S)
        return self.next_message(lambda: True)

    def _introduce(self, task: dict[str, Any], deadline: float) -> None:
        """Connect to node 0 and send who this host is.

        The task itself is sent only when its digest differs, so that node 0 can say in what.
        """
        connection = Connection(socket.create_connection(self._address, timeout=max(0.1, deadline - time.monotonic())))
        with contextlib.ExitStack() as stack:
            stack.callback(connection.socket.close)
            answer = introduce(connection, self.node, self._token, {"task": digest(task)}, deadline)
            if answer.get("differs"):
                connection.send({"task": task})
                answer = connection.next_message(deadline)
            if "exit" in answer:
                raise error_from_json(answer)
            stack.pop_all()
        connection.node = 0
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._add(connection)

    def _add(self, connection: Connection) -> None:
        assert connection.node is not None
        self._connections[connection.node] = connection
        # it was lost between two attempts, and is here again
        if not self._running and self._ended.pop(connection.node, None):
            self.failed = next((result.cause for result in self._ended.values() if result.failed), None)
        while connection.received:  # what it sent right after its introduction
            self._take(connection.node, connection.received.popleft())

    # ------------------------------------------------------------ attempts

    def begin_attempt(self, number: int, store: str) -> None:
        """Attempt `number` begins on this host. Node 0 makes the others begin it too, with `store`."""
        if self.node:
            self.failed = None
        else:  # what has arrived since the last attempt counts in this one
            self._running = True
            self.broadcast({"begin": number, "store": store})

    def report_result(self, result: GroupResult) -> GroupResult:
        """This host's part of the attempt has ended, or cannot begin.

        Node 0 waits for the results of the others, and returns that of all. The others send theirs to node 0, and
        return it.
        """
        if self.node:
            self.broadcast({"ended": result.to_json()})
            return result
        self._end(0, result)
        while len(self._ended) < self.nodes:
            self.wait_briefly()
        results = [self._ended[node] for node in sorted(self._ended)]
        self.failed, self._ended, self._running = None, {}, False
        return combine_hosts(results)

    def next_message(self, patience: Callable[[], bool]) -> dict[str, Any]:
        """Other hosts: node 0's next message, `{"begin", "store"}` or `{"end"}`; waits while `patience()`.

        PeerError when node 0 is lost, or patience is over. An error that node 0 sends is raised.
        """
        while not self._inbox:
            if 0 not in self._connections or not patience():
                raise PeerError(
                    f"{self.failed.message if self.failed else 'host 0 says nothing'}; start again with the same "
                    "run.dir to go on"
                )
            self.wait_briefly()
        message = self._inbox.popleft()
        if "exit" in message:
            raise error_from_json(message)
        return message

    def wait_briefly(self) -> None:
        """Wait a moment for messages, and handle what has arrived."""
        self._selector.select(_RETRY_S)
        self.tick()

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to every host that this one is connected with."""
        for connection in list(self._connections.values()):
            try:
                connection.send(message)
            except OSError as error:
                self._lose(connection, f"cannot be reached any more ({error})")

    def fileno(self) -> int:
        return self._selector.fileno()

    def receive(self) -> None:
        """Handle what has arrived, without waiting."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.read():
                if connection in self._newcomers:
                    self._admit(connection, message)
                elif connection.node is not None:
                    self._take(connection.node, message)
        except _MALFORMED as error:
            self._lose(connection, f"is gone ({error})")

    def tick(self) -> None:
        """Handle what has arrived, drop hosts that are silent, and send a sign of life."""
        self.receive()
        if self.stop and self.stop.count and not self._told_stop:
            self._told_stop = True
            self.broadcast({"stop": True})
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if now - connection.received_at > self._silence_s:
                self._lose(
                    connection,
                    f"has said nothing for launcher.hang_timeout_s={self._silence_s:g}: stopped, or the network is cut",
                )
        for connection in list(self._newcomers):
            if now - connection.since > HELLO_S:
                self._lose(connection, "")
        if now - self._beaten > min(_BEAT_S, self._silence_s / 4):
            self._beaten = now
            self.broadcast({})

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "ended" in message and self.node == 0:
            self._end(node, GroupResult.from_json(message["ended"]))
        elif "abort" in message:
            self.failed = Failed(**message["abort"])
        elif "stop" in message:
            if self.stop and not self.stop.count:
                self.stop.ask()
        elif message:
            self._inbox.append(message)

    def _end(self, node: int, result: GroupResult) -> None:
        self._ended[node] = result
        if result.failed and result.cause:
            self._fail(result.cause)

    def _fail(self, cause: Failed) -> None:
        if not self.failed:
            self.failed = cause
            if self.node == 0:
                self.broadcast({"abort": asdict(cause)})

    def _lose(self, connection: Connection, how: str) -> None:
        """Close a connection. If its host was admitted, it has failed."""
        if connection.socket.fileno() < 0:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection in self._newcomers or connection.node is None:
            self._newcomers.remove(connection)
            return
        del self._connections[connection.node]
        text = f"host {connection.node} ({connection.name}) {how}"
        cause = Failed(connection.node * self._ranks, 0, int(Exit.PEER), text, "")
        if connection.node not in self._ended:
            self._end(connection.node, GroupResult(Exit.PEER, cause, external=True))
