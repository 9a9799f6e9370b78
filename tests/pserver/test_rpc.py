"""Requests over gRPC: who is answered, what an error tells, and where a service listens."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dtf.core.errors import AuthError, BusyError, ConfigError
from dtf.pserver.net.codec import Array, Schema, decode
from dtf.pserver.net.rpc import Client, Service, Tls
from dtf.pserver.net.transport import Failed, Lost, Refused, Stale
from tests.support.rpc_service import GENERATION, SOON_S, TOKEN, Handlers, after, client, echo, service


def listening() -> set[tuple[str, int]]:
    """Addresses, as /proc writes them, and ports of the sockets that this process listens on."""
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    }
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    addresses = (row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)
    return {(address, int(port, 16)) for address, port in addresses}


def test_bytes_there_and_back() -> None:
    with service({"echo": echo, "size": lambda data: str(len(data)).encode()}) as server, client(server) as caller:
        for data in (b"", b"x", os.urandom(5 << 20)):
            assert caller.call("echo", data, SOON_S) == data
        pending = [caller.start("size", bytes(n), SOON_S) for n in range(5)]
        assert [each.result() for each in pending] == [b"0", b"1", b"2", b"3", b"4"]


def test_requests_since_the_construction_have_waited() -> None:
    server = Service({"echo": echo}, TOKEN, GENERATION)
    with client(server) as caller:
        pending = caller.start("echo", b"early", SOON_S)
        server.start()
        assert pending.result() == b"early"
    server.stop(0)


def test_eight_threads_of_clients() -> None:
    with service({"echo": echo}) as server, contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        callers = [stack.enter_context(client(server)) for _ in range(4)]

        def work(number: int) -> bool:
            data = [bytes([number]) * size for size in (1, 1000, 100_000) * 10]
            return all(callers[number % 4].call("echo", each, SOON_S) == each for each in data)

        assert all(pool.map(work, range(8)))


# ---------------------------------------------------------------- who is answered


@pytest.mark.parametrize("token", ["x", "t" * 63, "T" * 64, "t" * 65])
def test_without_the_token_nothing_is_said(token: str) -> None:
    called: list[bytes] = []
    with service({"echo": lambda data: called.append(data) or data}) as server, client(server, token) as caller:
        for method in ("echo", "no-such"):
            with pytest.raises(AuthError, match="give all processes of a run the same token"):
                caller.call(method, b"x", SOON_S)
        with grpc.insecure_channel(server.endpoint) as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/dtf.pserver/echo")(b"x", timeout=SOON_S)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    assert not called


def test_the_unauthenticated_are_told_at_once_and_their_body_is_not_taken() -> None:
    """Also while every thread is busy, and with a body that would take longer than that, or be refused, if it were
    received.
    """
    release = threading.Event()
    handlers: Handlers = {"wait": after(release)}
    with (
        service(handlers, threads=1, most_bytes=1 << 20) as server,
        client(server) as busy,
        client(server, "x", most_bytes=1 << 28) as caller,
    ):
        waiting = [busy.start("wait", b"", 60.0) for _ in range(2)]
        for size in (0, 100 << 20, 0):
            with pytest.raises(AuthError):
                caller.call("wait", bytes(size), SOON_S)
        release.set()
        assert [each.result() for each in waiting] == [b"", b""]


def test_another_attempt_of_the_run() -> None:
    with service({"echo": echo}) as server, client(server, generation="attempt-2") as caller:
        with pytest.raises(Stale, match="another attempt"):
            caller.call("echo", b"x", SOON_S)
        with pytest.raises(Stale):
            caller.start("echo", b"x", SOON_S).result()


@pytest.mark.parametrize(("token", "generation"), [("", "1"), ("t", ""), ("t\n", "1"), ("ü", "1")])
def test_a_token_is_text_that_can_be_sent(token: str, generation: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Service({}, token, generation)
    with pytest.raises(ValueError, match="printable ASCII"):
        Client("127.0.0.1:1", token, generation)


def test_health_as_orchestrators_ask_for_it() -> None:
    ask, answer = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    with service({}) as server, grpc.insecure_channel(server.endpoint) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", ask.SerializeToString, answer.FromString)
        assert check(ask(), timeout=SOON_S).status == answer.SERVING
        server.ready = lambda: False
        assert check(ask(service=""), timeout=SOON_S).status == answer.NOT_SERVING
        assert check(ask(service="any"), timeout=SOON_S).status == answer.NOT_SERVING


def test_a_health_check_is_answered_without_its_body() -> None:
    """A body that was received would be refused, as it is above the limit."""
    with service({}, most_bytes=1000) as server, grpc.insecure_channel(server.endpoint) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(bytes(300 << 20), timeout=SOON_S) == b"\x08\x01"


@pytest.mark.parametrize("where", ["value", "many"])
def test_of_a_stranger_only_small_metadata_is_read(where: str) -> None:
    large = [("x", "x" * 30_000)] if where == "value" else [(f"x{n}", "y" * 20) for n in range(1000)]
    with service({"echo": echo}) as server, grpc.insecure_channel(server.endpoint) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/dtf.pserver/echo")(b"", timeout=SOON_S, metadata=tuple(large))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_waiting_for_a_server_that_is_not_there_yet() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with client(address) as caller, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(caller.wait_ready, SOON_S)
        server = Service({"echo": echo}, TOKEN, GENERATION, address)
        server.ready = lambda: False
        server.start()
        with pytest.raises(Lost):
            caller.wait_ready(0.1)
        assert not waiting.done()
        server.ready = lambda: True
        waiting.result()
        assert caller.call("echo", b"x", SOON_S) == b"x"
        server.stop(0)


# ---------------------------------------------------------------- what an error tells


def raises(error: Exception) -> Callable[[bytes], bytes]:
    def handler(data: bytes) -> bytes:
        raise error

    return handler


def test_an_exception_does_not_travel(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Exception] = []
    crash = KeyError("password=hunter2")
    with service({"crash": raises(crash), "echo": echo}, on_error=seen.append) as server, client(server) as caller:
        with pytest.raises(Failed) as error:
            caller.call("crash", b"x", SOON_S)
        assert "hunter2" not in str(error.value)
        assert seen == [crash] and "hunter2" in caplog.text
        assert caller.call("echo", b"unharmed", SOON_S) == b"unharmed"


def test_a_refusal_says_why_shortly() -> None:
    schema = Schema({}, {"ids": Array(1, ("i64",))})
    handlers: Handlers = {
        "no": raises(Refused("no table\n\x1b[31mred " + "x" * 1000)),
        "old": raises(Stale("lease of attempt 2")),
        "parse": lambda data: decode(schema, data) and b"",
    }
    with service(handlers) as server, client(server) as caller:
        with pytest.raises(Refused, match=r"no table\\n\\x1b\[31mred x+$") as error:
            caller.call("no", b"", SOON_S)
        assert len(str(error.value)) < 600
        with pytest.raises(Stale, match="lease of attempt 2"):
            caller.call("old", b"", SOON_S)
        with pytest.raises(Refused, match="shorter than the head"):
            caller.call("parse", b"garbage", SOON_S)
        with pytest.raises(Refused, match="Method not found"):
            caller.call("no-such", b"", SOON_S)


def test_messages_above_the_limit_are_refused_both_ways() -> None:
    called: list[int] = []
    handlers: Handlers = {"take": lambda data: called.append(len(data)) or b"", "give": lambda data: bytes(int(data))}
    with (
        service(handlers, most_bytes=1000) as server,
        client(server) as caller,
        client(server, most_bytes=500) as small,
    ):
        with pytest.raises(Refused):
            caller.call("take", bytes(1001), SOON_S)
        with pytest.raises(Refused):
            caller.call("give", b"1001", SOON_S)
        for method, data in (("take", bytes(501)), ("give", b"501")):
            with pytest.raises(Refused):
                small.call(method, data, SOON_S)
        assert not called
        assert len(caller.call("give", b"1000", SOON_S)) == 1000


def test_garbage_on_the_socket_leaves_the_server_unharmed() -> None:
    with service({"echo": echo}) as server, client(server) as caller:
        host, _, port = server.endpoint.rpartition(":")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for data in (
            os.urandom(4096),
            b"GET / HTTP/1.1\r\n\r\n",
            preface + os.urandom(4096),
            preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100),
        ):
            with (
                socket.create_connection((host, int(port)), timeout=SOON_S) as raw,
                contextlib.suppress(ConnectionError),
            ):
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
            assert caller.call("echo", b"x", SOON_S) == b"x"


# ---------------------------------------------------------------- where it listens


def test_it_listens_on_loopback_alone() -> None:
    before = listening()
    with service({"echo": echo}) as server:
        (addresses,) = listening() - before
        assert addresses in {("0100007F", addresses[1]), ("0000000000000000FFFF00000100007F", addresses[1])}
        assert server.endpoint == f"127.0.0.1:{addresses[1]}"
    assert listening() <= before


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_never_on_every_interface(address: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        Service({}, TOKEN, GENERATION, address, allow_insecure=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:70000", "::1:0", "unix:/tmp/x", "no such host:0"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="address="):
        Service({}, TOKEN, GENERATION, address)


def test_beyond_loopback_needs_a_word() -> None:
    with pytest.raises(ConfigError, match="allow_insecure"):
        Service({}, TOKEN, GENERATION, "192.0.2.1:0")
    # it is allowed, but of documentation and of no host
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Service({}, TOKEN, GENERATION, "192.0.2.1:0", allow_insecure=True)


def test_a_port_that_is_taken() -> None:
    with service({}) as server, pytest.raises(BusyError, match="taken"):
        Service({}, TOKEN, GENERATION, server.endpoint)


def test_ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    with service({"echo": echo}, address="[::1]:0") as server, client(server) as caller:
        assert server.endpoint.startswith("[::1]:")
        assert caller.call("echo", b"x", SOON_S) == b"x"


def certificate(folder: Path, name: str, hosts: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A key and a certificate of its own."""
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    extension = ["-addext", f"subjectAltName={hosts}"] if hosts else []
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    ]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert), *extension], check=True, capture_output=True)
    return key, cert


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    (key, cert), (other_key, other) = certificate(tmp_path, "run"), certificate(tmp_path, "stranger")
    with service({"echo": echo}, tls=Tls(cert=cert, key=key)) as server:
        with client(server, tls=Tls(ca=cert)) as caller:
            assert caller.call("echo", b"x", SOON_S) == b"x"
        for wrong in (Tls(ca=other), None):
            with client(server, tls=wrong) as caller, pytest.raises(Lost):
                caller.call("echo", b"x", SOON_S)
    with service({"echo": echo}, tls=Tls(ca=cert, cert=cert, key=key, mutual=True)) as server:
        with client(server, tls=Tls(ca=cert, cert=cert, key=key, mutual=True)) as caller:
            assert caller.call("echo", b"x", SOON_S) == b"x"
        for wrong in (Tls(ca=cert), Tls(ca=cert, cert=other, key=other_key, mutual=True)):
            with client(server, tls=wrong) as caller, pytest.raises(Lost):
                caller.call("echo", b"x", SOON_S)
    with pytest.raises(ConfigError, match="needs the file of its key"):
        Service({}, TOKEN, GENERATION, tls=Tls(cert=cert))
    with pytest.raises(ConfigError, match="cannot be read"):
        Service({}, TOKEN, GENERATION, tls=Tls(cert=cert, key=tmp_path / "none"))
    (tmp_path / "garbage").write_text("no PEM")
    with pytest.raises(ConfigError, match="no certificate"):
        Service({}, TOKEN, GENERATION, tls=Tls(cert=tmp_path / "garbage", key=key))


def test_grpc_is_told_to_be_quiet_before_it_is_imported() -> None:
    """Otherwise it reports every connection that ends."""
    code = "import dtf.pserver.net.rpc, os; print(os.environ['GRPC_VERBOSITY'])"
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ERROR\n", done.stderr
