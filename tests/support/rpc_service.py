"""A service in this process and clients of it, for tests of requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dtf.pserver.net.rpc import Client, Service

TOKEN, GENERATION, SOON_S = "t" * 64, "attempt-3", 60.0
Handlers = dict[str, Callable[[bytes], bytes]]


@contextlib.contextmanager
def service(handlers: Handlers, **options: Any) -> Iterator[Service]:
    server = Service(handlers, TOKEN, GENERATION, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop(0)


@contextlib.contextmanager
def client(server: Service | str, token: str = TOKEN, generation: str = GENERATION, **options: Any) -> Iterator[Client]:
    caller = Client(server if isinstance(server, str) else server.endpoint, token, generation, **options)
    try:
        yield caller
    finally:
        caller.close()


def echo(data: bytes) -> bytes:
    return data


def after(event: threading.Event, entered: threading.Semaphore | None = None) -> Callable[[bytes], bytes]:
    """A handler that answers with what it got, once `event` is set."""

    def handler(data: bytes) -> bytes:
        if entered:
            entered.release()
        event.wait(60)
        return data

    return handler
