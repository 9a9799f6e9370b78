"""Bytes and round trips per second of requests on loopback, and the seconds of CPU that they take.

    python -m bench.rpc                       # plain gRPC, gRPC with kept buffers, dtf's client and service, and
                                              # messages of arrays over these
    python -m bench.rpc --kinds dtf --clients 2 --threads 4
    python -m bench.rpc --address '[::1]:0'   # or unix:/tmp/socket, for the first two kinds

The server is a process of its own. `push`: the request is large, `pull`: the response is, `echo`: both are. Each number
is the median over rounds in which the kinds take turns, so that a busy machine slows all of them alike. `of plain`:
bytes per second over those of plain gRPC.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.rows import Row, table, with_ratios
from dtf.pserver.net.codec import Array, Schema, decode, encode
from dtf.pserver.net.rpc import Client, Service, keep_buffers

KINDS = ("plain", "kept", "dtf", "message")
WAYS = ("push", "pull", "echo")
MOST = 1 << 28
ROOT = Path(__file__).resolve().parents[1]
QUICK = ["--ways", "push", "--sizes", "100", "--rounds", "1", "--seconds", "0.01", "--kinds", "plain", "dtf"]
TITLES = {
    "plain": "gRPC as it comes", "kept": "gRPC that keeps memory", "dtf": "dtf's client and service",
    "message": "messages of arrays over these",
}  # fmt: skip
OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MOST), ("grpc.max_send_message_length", MOST)]
SCHEMA = Schema({"step": int}, {"rows": Array(2)})
Call = Callable[[str, bytes], bytes]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows(size: int) -> np.ndarray:
    return np.ones((max(1, size // 64), 16), np.float32)


class Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: dict[str, Callable[[bytes], bytes]]) -> None:
        self._handlers = {
            f"/plain/{name}": grpc.unary_unary_rpc_method_handler(lambda data, _, handler=handler: handler(data))
            for name, handler in handlers.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def serve(kind: str, address: str) -> None:
    """One kind of server, until standard input ends."""
    replies: dict[int, Any] = {}

    def pull(data: bytes) -> bytes:
        size = int(data)
        if kind == "message":
            return encode(SCHEMA, {"step": 1}, {"rows": replies.setdefault(size, rows(size))})
        return replies.setdefault(size, bytes(size))

    def push(data: bytes) -> bytes:
        return b"" if kind != "message" else encode(SCHEMA, {"step": decode(SCHEMA, data).arrays["rows"].shape[0]}, {})

    def echo(data: bytes) -> bytes:
        return data if kind != "message" else encode(SCHEMA, {}, decode(SCHEMA, data).arrays)

    handlers: dict[str, Callable[[bytes], bytes]] = {
        "push": push,
        "pull": pull,
        "echo": echo,
        "cpu": lambda _: repr(cpu_s()).encode(),
    }
    if kind in ("dtf", "message"):
        service = Service(handlers, "token", "generation", address, most_bytes=MOST)
        print(service.endpoint, flush=True)
        service.start()
        sys.stdin.read()
        service.stop(0)
        return
    if kind == "kept":
        keep_buffers()
    server = grpc.server(ThreadPoolExecutor(16), [Handlers(handlers)], options=OPTIONS)
    port = server.add_insecure_port(address)
    print(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}", flush=True)
    server.start()
    sys.stdin.read()
    server.stop(0).wait()


def caller(kind: str, endpoint: str, stack: ExitStack) -> Call:
    if kind in ("dtf", "message"):
        client = Client(endpoint, "token", "generation", MOST)
        stack.callback(client.close)
        return lambda method, data: client.call(method, data, 60.0)
    channel = stack.enter_context(grpc.insecure_channel(endpoint, [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]))
    stubs = {name: channel.unary_unary(f"/plain/{name}") for name in (*WAYS, "cpu")}
    return lambda method, data: stubs[method](data, timeout=60.0)


def once(kind: str, way: str, size: int, call: Call, data: Any) -> int:
    """One request; the bytes that went over."""
    if kind == "message":
        sent = encode(SCHEMA, {"step": 1}, {"rows": data}) if way != "pull" else b"%d" % size
        got = call(way, sent)
        decode(SCHEMA, got)
        return len(sent) + len(got)
    sent = data if way != "pull" else b"%d" % size
    return len(sent) + len(call(way, sent))


@contextmanager
def client_process(kind: str, args: argparse.Namespace) -> Iterator[Callable[[str, int], list[float]]]:
    """A server of this kind and a process that calls it; `ask(way, size)` -> bytes/s, median latency, CPU of client and
    server per GB.
    """
    command = [sys.executable, "-m", "bench.rpc", "--role", "call", "--kinds", kind, "--address", args.address]
    command += ["--threads", str(args.threads), "--clients", str(args.clients), "--seconds", str(args.seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin and process.stdout
        asking, answers = process.stdin, process.stdout

        def ask(way: str, size: int) -> list[float]:
            print(way, size, file=asking, flush=True)
            return [float(word) for word in answers.readline().split()]

        yield ask
        asking.close()


def call(kind: str, args: argparse.Namespace) -> None:
    """The calling process: measures what standard input asks for."""
    if kind == "kept":
        keep_buffers()
    command = [sys.executable, "-m", "bench.rpc", "--role", "serve", "--kinds", kind, "--address", args.address]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server,
        ExitStack() as stack,
    ):
        assert server.stdin and server.stdout
        endpoint = server.stdout.readline().strip()
        callers = [caller(kind, endpoint, stack) for _ in range(args.clients)]
        pool = stack.enter_context(ThreadPoolExecutor(args.threads))
        for line in sys.stdin:
            way, size = line.split()[0], int(line.split()[1])
            data = rows(size) if kind == "message" else bytes(size)
            for client in callers:
                once(kind, way, size, client, data)
            before, start = (cpu_s(), float(callers[0]("cpu", b""))), time.perf_counter()
            end = start + args.seconds

            def work(
                index: int, way: str = way, size: int = size, data: Any = data, end: float = end
            ) -> tuple[int, list[float]]:
                moved, took = 0, []
                while not took or time.perf_counter() < end:
                    at = time.perf_counter()
                    moved += once(kind, way, size, callers[index % len(callers)], data)
                    took.append(time.perf_counter() - at)
                return moved, took

            done = list(pool.map(work, range(args.threads)))
            wall, moved = time.perf_counter() - start, sum(count for count, _ in done)
            used = cpu_s() - before[0], float(callers[0]("cpu", b"")) - before[1]
            took = [latency for _, some in done for latency in some]
            print(
                moved / wall,
                statistics.median(took),
                len(took) / wall,
                used[0] / len(took),
                used[1] / len(took),
                flush=True,
            )
        server.stdin.close()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("compare", "call", "serve"), default="compare", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--sizes", nargs="+", type=int, default=(100, 65_536, 2 << 20, 8 << 20, 45 << 20), help="bytes")
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--clients", type=int, default=1, help="connections")
    parser.add_argument("--threads", type=int, default=1, help="that call, shared among the connections")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one measurement")
    return parser


def compare(args: argparse.Namespace) -> list[Row]:
    found = []
    with ExitStack() as stack:
        ask = {kind: stack.enter_context(client_process(kind, args)) for kind in args.kinds}
        for way in args.ways:
            for size in args.sizes:
                measured: dict[str, list[list[float]]] = {kind: [] for kind in args.kinds}
                for number in range(args.rounds):
                    for kind in list(args.kinds)[:: -1 if number % 2 else 1]:
                        measured[kind].append(ask[kind](way, size))
                work = f"{way}, {size:,} bytes"
                for kind, some in measured.items():
                    small, cpu = size < 1000, [1e3 * (one[3] + one[4]) for one in some]
                    values = [one[2] if small else one[0] / 1e6 for one in some]
                    unit = "requests/s" if small else "MB/s"
                    found.append(Row(work, TITLES[kind], unit, values, True, cpu, "ms a request"))
    return with_ratios(found, TITLES["dtf"])


def measure(quick: bool) -> list[Row]:
    return compare(options().parse_args(QUICK if quick else ["--ways", "push", "pull", "--rounds", "20"]))


def main() -> None:
    args = options().parse_args()
    if args.role == "compare":
        print(table(compare(args)))
    else:
        (serve(args.kinds[0], args.address) if args.role == "serve" else call(args.kinds[0], args))


if __name__ == "__main__":
    main()
