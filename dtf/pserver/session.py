"""How trainers find servers: a service for each server, and its address where all of them look. The only part of the parameter server that opens sockets."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore

from dtf.launcher import Place
from dtf.pserver.desk import Desk
from dtf.pserver.rpc import Client, Service
from dtf.pserver.serving import Serving
from dtf.pserver.trainer import Trainer
from dtf.pserver.transport import Retrying
from dtf.strategy import Errand, Program, Task
from dtf.world import World

if TYPE_CHECKING:
    from dtf.strategies.pserver import Pserver

MEET_S = 600.0
"""For servers to start."""

LEASE_S = 60.0
"""Silence of a trainer after which others get its work."""

PATIENCE_S = 10.0
"""For a request that is lost to arrive after all."""

STOP_S = 1.0


def serve(task: Task, world: World, strategy: Pserver, trainers: int) -> Program:
    """The program of a server, with its service running. Collective over the servers."""
    serving = Serving(task, world, strategy, strategy.merging(), trainers)
    place = world.place
    desk = Desk(serving, task, world.facts, world.rank, LEASE_S)
    threads = strategy.rpc_threads or 4 + 2 * trainers
    service = Service(desk.handlers, place.token, place.prefix, threads=threads, on_error=serving.fail)
    service.start()
    serving.on_end(lambda: service.stop(STOP_S))
    _store(place).set(f"server/{world.rank}", service.endpoint)
    return serving


def train(task: Task, errand: Errand, strategy: Pserver, trainers: int) -> None:
    """A trainer's life. PeerError when a server is gone."""
    place, store = errand.place, _store(errand.place)
    servers = []
    for server in range(strategy.servers):
        endpoint = store.get(f"server/{server}").decode()
        servers.append(Retrying(Client(endpoint, place.token, place.prefix), PATIENCE_S))
    number = place.rank - strategy.servers
    Trainer(task, errand, strategy, strategy.merging(), trainers, number, servers).run()


def _store(place: Place) -> PrefixStore:
    host, _, port = place.store.rpartition(":")
    return PrefixStore(place.prefix, TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_S)))
