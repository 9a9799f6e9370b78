"""Requests that are lost: servers that go away, deadlines, and sending again."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from dtf.api.helper_roles import RoleContext
from dtf.api.task import Task
from dtf.core.errors import AuthError, PeerError
from dtf.core.types import ManualStart, Place
from dtf.pserver import manual_rendezvous
from dtf.pserver.net.codec import Parts, WireError
from dtf.pserver.net.rpc import Service
from dtf.pserver.net.transport import Failed, Lost, Refused, RetryingTransport, Stale
from dtf.pserver.strategy import Pserver
from tests.support.launching import HANG_S, LONG_S
from tests.support.lossy_network import LossyTransport
from tests.support.rpc_service import GENERATION, SOON_S, TOKEN, after, client, service

CHILD = f"""
import sys, threading
from dtf.pserver.net.rpc import Service
calls = {{"echo": lambda data: data, "hang": lambda data: threading.Event().wait() and b""}}
server = Service(calls, {TOKEN!r}, {GENERATION!r}, sys.argv[1])
server.start()
print(server.endpoint, flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def child(address: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_server_is_noticed_at_once_and_a_new_one_found() -> None:
    with child() as (process, endpoint), client(endpoint) as caller:
        assert caller.call("echo", b"x", SOON_S) == b"x"
        waiting = caller.start("hang", b"", LONG_S)
        killed = time.monotonic()
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Lost):
            waiting.result()
        with pytest.raises(Lost):  # nobody listens any more
            caller.call("echo", b"x", LONG_S)
        assert time.monotonic() - killed < HANG_S
        process.wait()
        with child(endpoint):
            assert RetryingTransport(caller, SOON_S).call("echo", b"again", 5.0) == b"again"


@pytest.mark.slow
def test_a_server_that_stands_still_is_noticed_before_the_deadline() -> None:
    with child() as (process, endpoint), client(endpoint) as caller:
        waiting = caller.start("hang", b"", LONG_S)
        caller.call("echo", b"x", SOON_S)
        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(Lost, match="UNAVAILABLE"):
            waiting.result()
        assert time.monotonic() - start < HANG_S


def test_a_deadline_is_kept() -> None:
    release = threading.Event()
    with service({"wait": after(release)}) as server, client(server) as caller:
        with pytest.raises(Lost, match="DEADLINE"):
            caller.call("wait", b"", 0.05)
        for none in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="deadline"):
                caller.call("wait", b"", none)
        release.set()


def test_it_stops_with_calls_under_way() -> None:
    entered, release = threading.Semaphore(0), threading.Event()
    server = Service({"wait": after(release, entered)}, TOKEN, GENERATION)
    server.start()
    with client(server) as caller:
        waiting = [caller.start("wait", b"", LONG_S) for _ in range(4)]
        for _ in waiting:
            entered.acquire()
        start = time.monotonic()
        server.stop(0.1)
        assert time.monotonic() - start < HANG_S
        for each in waiting:
            with pytest.raises(Lost):
                each.result()
        release.set()


def test_it_stops_when_calls_are_done_within_the_grace() -> None:
    entered, release = threading.Semaphore(0), threading.Event()
    server = Service({"wait": after(release, entered)}, TOKEN, GENERATION)
    server.start()
    with client(server) as caller, ThreadPoolExecutor(1) as pool:
        waiting = caller.start("wait", b"kept", 60.0)
        entered.acquire()
        stopping = pool.submit(server.stop, 60.0)
        with pytest.raises(Lost):  # nothing new, from now on or soon
            while True:
                caller.call("wait", b"new", 0.2)
        release.set()
        stopping.result(SOON_S)
        assert waiting.result() == b"kept"


def test_a_closed_client_loses_what_is_under_way() -> None:
    release = threading.Event()
    with service({"wait": after(release)}) as server, client(server) as caller:
        waiting = caller.start("wait", b"", 60.0)
        caller.close()
        with pytest.raises(Lost):
            waiting.result()
        release.set()


# ---------------------------------------------------------------- sending again


class Scripted:
    """Answers, or raises, what it was given, in order."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self._answers, self.deadlines = iter(answers), list[float]()

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> bytes:
        self.deadlines.append(deadline_s)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Any:
        raise NotImplementedError


def test_only_what_was_lost_is_sent_again() -> None:
    sender = RetryingTransport(Scripted(Lost("1"), Lost("2"), b"answer"), 60.0)
    assert sender.call("m", b"", 1.0) == b"answer" and sender.retries == 2
    for error in (Refused("r"), Stale("s"), Failed("f"), AuthError("a"), WireError("w")):
        with pytest.raises(type(error)):
            RetryingTransport(Scripted(error, b"never"), 60.0).call("m", b"", 1.0)


def test_patience_ends() -> None:
    inner = Scripted(*[Lost("gone")] * 1000)
    start = time.monotonic()
    with pytest.raises(Lost, match="gone"):
        RetryingTransport(inner, 0.2).call("m", b"", 1.0)
    assert 0.15 < time.monotonic() - start < HANG_S
    assert 3 <= len(inner.deadlines) < 30 and all(each <= 0.2 for each in inner.deadlines[1:])


def test_closing_ends_the_patience() -> None:
    sender = RetryingTransport(Scripted(*[Lost("gone")] * 1000), 60.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.call, "m", b"", 1.0)
        sender.close()
        with pytest.raises(Lost):
            waiting.result(SOON_S)


@pytest.mark.slow
def test_an_idempotent_count_survives_a_bad_network() -> None:
    """Four threads, a tenth of everything lost, doubled or late: every request is applied once, and nothing else is."""
    applied, arrived, lock = set[bytes](), Counter[bytes](), threading.Lock()

    def add(data: bytes) -> bytes:
        with lock:
            arrived[data] += 1
            applied.add(data)
        return data

    keys = [[b"%d-%d" % (thread, number) for number in range(60)] for thread in range(4)]
    with service({"add": add}) as server, client(server) as caller, ThreadPoolExecutor(4) as pool:
        network = LossyTransport(caller, seed=5)
        sender = RetryingTransport(network, 60.0)

        def work(own: list[bytes]) -> bool:
            pending = [sender.start("add", key, SOON_S) for key in own[:30]]
            return [each.result() for each in pending] + [sender.call("add", key, SOON_S) for key in own[30:]] == own

        assert all(pool.map(work, keys))
        network.flush()
    assert applied == set(itertools.chain(*keys))
    assert max(arrived.values()) > 1 and sender.retries > 0
    assert all(network.met[name] > 0 for name in ("lose_request", "lose_response", "double", "late"))


def test_servers_that_are_lost_for_good_are_waited_for_as_long_as_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not first for what is on its way and then for them."""

    class Gone:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...
        def wait_ready(self, deadline_s: float) -> None: ...
        def close(self) -> None: ...
        def call(self, *arguments: Any) -> bytes:
            raise Lost("lost server 0")

    info = manual_rendezvous.RendezvousInfo("generation", "", "run", "id", "host")
    monkeypatch.setattr(manual_rendezvous, "Client", Gone)
    monkeypatch.setattr(manual_rendezvous.Member, "wait_complete", lambda *arguments: info)
    monkeypatch.setattr(manual_rendezvous, "run_trainers", lambda *arguments: arguments[-1][0].call("lease", b"", 1.0))
    place = Place(manual=ManualStart(("127.0.0.1:1",), timeout_s=0.3))
    context = RoleContext(place, {"config": {}}, lambda *arguments: None, lambda phase, step: None, lambda: False)  # type: ignore[arg-type, return-value]
    begun = time.monotonic()
    with pytest.raises(PeerError, match=r"within launcher\.timeout_s=0\.3: lost server 0"):
        manual_rendezvous.ManualTrainer(cast(Task, None), context, Pserver(), 1, 0).run()
    assert 0.3 <= time.monotonic() - begun < HANG_S
