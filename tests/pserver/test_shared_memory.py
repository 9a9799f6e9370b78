"""Messages in memory that two processes of a host share: the same answers as without, little on the wire, and nothing
of a message that is not its own.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from dtf.pserver.net.codec import Buffer, Parts
from dtf.pserver.net.shared_memory import (
    LEAST_BYTES,
    Handler,
    InPlace,
    Put,
    Regions,
    SharedMemoryTransport,
    _Region,
    host_id,
)
from dtf.pserver.net.transport import Lost, Pending, Refused, RetryingTransport
from tests.support.rpc_service import GENERATION, SOON_S, TOKEN, client, echo, service

LARGE = 3 * LEAST_BYTES
pytestmark = pytest.mark.skipif(not host_id(), reason="memory is shared through Linux's memfd and /proc")


class Wire:
    """A transport that calls a handler, and keeps what passes. `before` sees each request first."""

    def __init__(self, handler: Handler) -> None:
        self._handler, self.passed = handler, list[bytes]()
        self.before: Callable[[bytes], None] = lambda data: None

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> bytes:
        data = bytes(data)
        self.before(data)
        answer = self._handler(data)
        self.passed += [data, answer]
        return answer

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Pending:
        done: Future[bytes] = Future()
        done.set_result(self.call(method, data, deadline_s))
        return done


def doubled(data: bytes) -> bytes:
    return data + data


def test_answers_are_those_of_the_handler() -> None:
    wire = Wire(Regions(8).around(doubled))
    caller = SharedMemoryTransport(wire)
    for size in (0, 1, LARGE, LEAST_BYTES - 1, 10 * LARGE, LARGE, 5):
        data = os.urandom(size)
        assert caller.call("double", data, SOON_S) == doubled(data)


def test_large_messages_stay_off_the_wire() -> None:
    wire = Wire(Regions(8).around(doubled))
    caller = SharedMemoryTransport(wire)
    for _ in range(4):
        caller.call("double", bytes(LARGE), SOON_S)
    sizes = [len(data) for data in wire.passed]
    assert max(sizes[::2]) < 200 and sizes[1] == 2 * LARGE, "the first answer is larger than anybody knew"
    assert max(sizes[3::2]) < 200


def test_many_threads_over_grpc() -> None:
    with service({"double": doubled, "echo": echo}) as server, client(server) as inner, ThreadPoolExecutor(8) as pool:
        caller = SharedMemoryTransport(inner)

        def work(number: int) -> bool:
            equal = []
            for size in (10, LARGE, 4 * LARGE, 100, LARGE):
                data = bytes([number]) * (size + number)
                pending = caller.start("echo", data, SOON_S)
                equal += [caller.call("double", data, SOON_S) == doubled(data), pending.result() == data]
            return all(equal)

        assert all(pool.map(work, range(32)))


def test_an_answer_that_is_asked_for_twice_gives_its_region_back_once() -> None:
    caller = SharedMemoryTransport(Wire(Regions(8).around(echo)))
    pending = caller.start("echo", b"a" * LARGE, SOON_S)
    assert pending.result() == pending.result() == b"a" * LARGE
    both = [caller.start("echo", letter * LARGE, SOON_S) for letter in (b"b", b"c")]
    assert [answer.result() for answer in both] == [b"b" * LARGE, b"c" * LARGE]


def in_parts_of(data: bytes) -> Parts:
    return Parts([data[:10], np.frombuffer(data[10:], np.uint8)], len(data))


def test_an_answer_that_somebody_has_is_not_written_over() -> None:
    caller = SharedMemoryTransport(Wire(Regions(8).around(InPlace(lambda data, put: put(bytes(data))))))
    caller.call("echo", in_parts_of(b"?" * LARGE), SOON_S)  # now the room of an answer is known
    kept = [np.asarray(caller.call("echo", in_parts_of(letter * LARGE), SOON_S)) for letter in (b"a", b"b", b"c")]
    views = [answer[100:] for answer in kept]
    del kept
    caller.call("echo", in_parts_of(b"d" * LARGE), SOON_S)
    assert [bytes(view) for view in views] == [letter * (LARGE - 100) for letter in (b"a", b"b", b"c")]
    assert len(caller._read) == 1, "that of the last answer, which nobody has"
    regions = {id(region) for region in caller._read}
    del views
    assert len(caller._read) == 4
    assert caller._region("echo", LARGE) is not None
    assert len(caller._free) == 3 and regions


def test_what_is_in_parts_is_the_same_message() -> None:
    seen: list[bytes] = []

    def keep(data: Buffer, put: Put) -> bytes:
        seen.append(bytes(data))
        return put(in_parts_of(bytes(data) + b"!"))

    caller, data = SharedMemoryTransport(Wire(Regions(8).around(InPlace(keep)))), os.urandom(LARGE)
    answers = [bytes(caller.call("keep", request, SOON_S)) for request in (data, in_parts_of(data), data)]
    assert seen == [data] * 3 and answers == [data + b"!"] * 3


def test_another_host_gets_messages_whole() -> None:
    wire = Wire(Regions(8).around(doubled))
    caller = SharedMemoryTransport(wire)
    caller._host = b"h" * 16
    for _ in range(3):
        assert caller.call("double", bytes(LARGE), SOON_S) == bytes(2 * LARGE)
    assert [len(data) for data in wire.passed[2::2]] == [LARGE, LARGE, LARGE], "asked once, then never again"


def test_a_region_whose_request_was_lost_is_used_no_more() -> None:
    """The server may still be at it, and write its answer late."""
    regions, late = Regions(8), list[bytes]()
    wire = Wire(regions.around(echo))

    def lose(data: bytes) -> None:
        if not late:
            late.append(data)
            raise Lost("it was")

    wire.before = lose
    caller = SharedMemoryTransport(wire)
    with pytest.raises(Lost):
        caller.call("echo", b"a" * LARGE, SOON_S)
    seen: list[bytes] = []
    wire.before = lambda data: seen.append(data)
    assert caller.call("echo", b"b" * LARGE, SOON_S) == b"b" * LARGE
    assert seen[0][24:44] != late[0][24:44], "descriptor and key of another region"


def test_sent_again_it_arrives() -> None:
    wire, losses = Wire(Regions(8).around(doubled)), iter([True, True, False])

    def lose(data: bytes) -> None:
        if next(losses, False):
            raise Lost("it was")

    wire.before = lose
    assert RetryingTransport(SharedMemoryTransport(wire), 5.0).call("double", bytes(LARGE), SOON_S) == bytes(2 * LARGE)


def test_a_request_that_comes_twice_is_refused_the_second_time() -> None:
    """By then the region may hold another one, or an answer that is being read."""
    handled: Counter[str] = Counter()

    def count(data: bytes) -> bytes:
        handled["all"] += 1
        return data

    handler = Regions(8).around(count)
    wire = Wire(handler)
    caller = SharedMemoryTransport(wire)
    caller.call("echo", bytes(LARGE), SOON_S)
    with pytest.raises(Refused):
        handler(wire.passed[0])
    caller.call("echo", bytes(LARGE), SOON_S)
    with pytest.raises(Refused):
        handler(wire.passed[0])
    assert handled["all"] == 2


def changed(request: bytes, at: int, kind: str, value: int) -> bytes:
    return request[:at] + struct.pack(kind, value) + request[at + struct.calcsize(kind) :]


def test_places_that_no_client_names() -> None:
    """A holder of the token may name anything: what is no region of this format is not read, let alone written."""
    handled: list[bytes] = []

    def note(data: bytes) -> bytes:
        handled.append(data)
        return data

    handler = Regions(8).around(note)
    region = _Region(LARGE)
    here = region.put(bytes(LARGE), host_id())
    with open(os.devnull, "rb") as null, open(__file__, "rb") as plain:
        for other in (0, 10**9):
            assert handler(changed(here, 20, "<I", other or 2**32 - 1)) == b"DTFN", "no such process"
        for fd in (null.fileno(), plain.fileno(), 2**31):
            assert handler(changed(here, 24, "<I", fd)) == b"DTFN", "no region"
    assert handler(here[:28] + bytes(16) + here[44:]) == b"DTFN", "another key"
    assert handler(changed(here, 52, "<Q", region.size + 4096)) == b"DTFN", "larger than it is"
    for wrong in (
        here[:-1],
        here + b"\0",
        changed(here, 52, "<Q", 2**63),
        changed(here, 60, "<Q", LARGE + 2**20),
        changed(here, 44, "<Q", 7),
        here[:4],
    ):
        with pytest.raises(Refused):
            handler(wrong)
    assert not handled and handler(here) and len(handled) == 1


def test_memory_that_could_be_cut_off_is_not_opened() -> None:
    """Whoever maps a file that shrinks under it is killed by the kernel."""
    region = _Region(LARGE)
    open_to_it = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(open_to_it, region.size)
        os.pwrite(open_to_it, region.key, 0)
        assert Regions(8).around(echo)(changed(region.put(bytes(LARGE), host_id()), 24, "<I", open_to_it)) == b"DTFN"
    finally:
        os.close(open_to_it)


def test_a_server_keeps_few_regions_open() -> None:
    regions = Regions(2)
    handler = regions.around(echo)
    kept = [_Region(LARGE) for _ in range(5)]
    for region in kept:
        handler(region.put(bytes(LARGE), host_id()))
    assert len(regions._open) == 2
    assert handler(kept[0].put(b"x" * LARGE, host_id()))[:4] == b"DTFA", "one that was given up is opened again"


def test_nothing_is_left_of_a_killed_client() -> None:
    """Its memory is gone with the next region that is opened, and what it asked for in vain disturbs nobody."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(data: bytes) -> bytes:
        entered.set()
        go_on.wait(60)
        return data

    code = f"""
from dtf.pserver.net.rpc import Client
from dtf.pserver.net.shared_memory import SharedMemoryTransport
import sys
SharedMemoryTransport(Client(sys.argv[1], "{TOKEN}", "{GENERATION}")).call("slow", bytes({LARGE}), 60.0)
"""
    with service({"slow": slow, "echo": echo}) as server:
        process = subprocess.Popen([sys.executable, "-c", code, server.endpoint])
        try:
            assert entered.wait(60)
            assert [owner for owner, _ in server._regions._open] == [process.pid]
        finally:
            process.kill()
            process.wait()
        go_on.set()
        with client(server) as inner:
            assert SharedMemoryTransport(inner).call("echo", b"y" * LARGE, SOON_S) == b"y" * LARGE
        assert [owner for owner, _ in server._regions._open] == [os.getpid()]


def test_memory_that_clients_gave_up_is_given_up() -> None:
    """Their messages grow, their descriptors are used again, and they go."""
    regions = Regions(64)
    caller = SharedMemoryTransport(Wire(regions.around(echo)))
    for size in (LARGE, 2 * LARGE, 4 * LARGE, 8 * LARGE):
        caller.call("echo", bytes(size), SOON_S)
        assert len(regions._open) == 1
    for _ in range(5):
        other = SharedMemoryTransport(Wire(regions.around(echo)))
        assert other.call("echo", b"z" * LARGE, SOON_S) == b"z" * LARGE
        del other
    assert len(regions._open) <= 2


def test_without_descriptors_messages_travel_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    wire = Wire(Regions(8).around(doubled))
    caller = SharedMemoryTransport(wire)
    assert caller.call("double", bytes(LARGE), SOON_S) == bytes(2 * LARGE) and len(wire.passed[0]) == LARGE


def test_who_may_only_look_has_no_region_opened() -> None:
    with service({"echo": echo, "look": echo}, viewer_methods=("look",)) as server, client(server) as inner:
        SharedMemoryTransport(inner).call("echo", bytes(LARGE), SOON_S)
        region = _Region(LARGE)
        request = region.put(bytes(LARGE), host_id())
        assert inner.call("look", request, SOON_S) == request, "it is taken as it comes"
        assert len(server._regions._open) == 1
