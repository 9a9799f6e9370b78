"""Services and clients of one run, and the launcher's store through which its processes exchange endpoints.

With `dtf.pserver.manual_rendezvous` the only part of the parameter server that opens sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed import PrefixStore

from dtf.core.types import Place
from dtf.distributed.store import rank_store
from dtf.pserver.net.messages import MEET, STATUS
from dtf.pserver.net.rpc import Client, Service, Tls
from dtf.pserver.net.shared_memory import SharedMemoryTransport
from dtf.pserver.net.transport import RetryingTransport

Handlers = Mapping[str, Callable[[bytes], bytes]]
"""Name of a method -> its handler."""

PATIENCE_S = 10.0
"""For how long a lost request is sent again."""


def make_service(handlers: Handlers, place: Place, trainers: int, address: str = "127.0.0.1:0") -> Service:
    """The service of a server, not started. `address`: HOST:PORT, port 0 for a free one. Errors as of `Service`.

    Each of the `trainers` may wait in two of its threads, for work and for state, and pushes need more.
    """
    return Service(
        handlers,
        place.token,
        place.prefix,
        address,
        threads=4 + 2 * trainers,
        tls=tls_files(place),
        allow_insecure=place.manual is not None and place.manual.allow_insecure,
        any_generation=(MEET, STATUS),
        viewer_methods=(STATUS,),
    )


def tls_files(place: Place) -> Tls | None:
    """The certificates of a process that was started manually; None without TLS."""
    if place.manual is None or not place.manual.tls:
        return None
    return Tls(**{name: Path(path) for name, path in place.manual.tls.items()}, mutual=place.manual.mutual_tls)


def launcher_store(place: Place) -> PrefixStore:
    """The store that the launcher keeps for this attempt of the run."""
    return rank_store(place, place.start_timeout_s)


def publish_endpoint(store: PrefixStore, server: int, endpoint: str) -> None:
    """Tell the other processes where a server listens."""
    store.set(f"server/{server}", endpoint)


def read_endpoints(store: PrefixStore, servers: int) -> list[str]:
    """Endpoints of all servers; waits until each server has published its own."""
    return [store.get(f"server/{server}").decode() for server in range(servers)]


def connect_servers(place: Place, servers: int) -> list[RetryingTransport]:
    """A transport to each server that the launcher started. Waits until all servers have published their endpoints."""
    endpoints = read_endpoints(launcher_store(place), servers)
    clients = [Client(endpoint, place.token, place.prefix) for endpoint in endpoints]
    return [RetryingTransport(SharedMemoryTransport(client), PATIENCE_S) for client in clients]
