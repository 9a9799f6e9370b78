"""How processes find each other: under a launcher by its store, by hand by server 0's endpoint.

The only part of the parameter server that opens sockets.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore

from dtf.api.strategy import Program, RendezvousContext, RoleContext
from dtf.api.task import Source, Task
from dtf.core.errors import BudgetError, BusyError, ConfigError, DtfError, PeerError, Preempted
from dtf.core.types import Place, Shard
from dtf.distributed.world import World
from dtf.host import network
from dtf.pserver.discovery import ASK_S, NOBODY, QUIET_S, Absent, Guest, Host, Told, Watch, not_here
from dtf.pserver.endpoint_file import Live, announce
from dtf.pserver.net import messages
from dtf.pserver.net.codec import encode
from dtf.pserver.net.messages import LEASE, MEET, STATUS
from dtf.pserver.net.rpc import Client, Service, Tls, viewer
from dtf.pserver.net.shared_memory import Shared
from dtf.pserver.net.transport import Lost, Retrying
from dtf.pserver.row_routing import shelves_of
from dtf.pserver.server.handlers import Desk
from dtf.pserver.server.program import Serving
from dtf.pserver.server.rows_server import Lending, Write
from dtf.pserver.server.status import snapshot
from dtf.pserver.trainer.group import Team
from dtf.pserver.trainer.group_compute import follow
from dtf.pserver.trainer.hogwild import numbers, work

if TYPE_CHECKING:
    from dtf.core.types import Batches
    from dtf.pserver.options import PserverOptions

Handlers = Mapping[str, Callable[[bytes], bytes]]

PATIENCE_S = 10.0
"""For a request that is lost to arrive after all."""

READY_S = 1.0
"""For a server that is there to have its state, before it is asked again whether it still is."""

STOP_S = 1.0

UNKNOWN = "none"
"""The attempt, for who does not know it yet."""


@dataclass
class Post:
    """What a server knows of its place before it has a state."""

    service: Service | None = None  # by hand: where others ask already, at `endpoint`
    endpoint: str = ""
    look: Callable[[], str] | None = None  # by hand: why the attempt cannot go on
    store: TCPStore | None = None  # kept for all servers, by server 0


def meet(standing: RendezvousContext, strategy: PserverOptions, trainers: int) -> tuple[RendezvousContext, Post]:
    """By hand: wait until all servers are there; trainers may come, and are told to wait."""
    place, endpoints = standing.place, strategy.where()
    if not endpoints:
        return standing, Post()
    _check_free(endpoints[place.rank], place.rank)
    service = _service({}, place, strategy, trainers, endpoints[place.rank])
    service.ready = lambda: False
    post = Post(service, endpoints[place.rank])
    if place.rank:
        return _arrive(standing, strategy, post, service), post
    store = ""
    if len(endpoints) > 1:
        host = network.endpoint(post.endpoint, "strategy.endpoints")[0]
        listener = network.listen(host, 0)
        port = listener.getsockname()[1]
        store = network.endpoint_text(host, port)
        post.store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    told = Told(place.prefix, store, str(standing.folder), standing.run_id, socket.gethostname())
    here = Host(told, len(endpoints), standing.facts, place.hang_timeout_s)
    service.add({MEET: here.meet})
    service.start()
    _gather(here, strategy.patience_s, standing, endpoints)
    post.look = here.look
    return replace(standing, place=replace(place, store=store)), post


def _check_free(endpoint: str, server: int) -> None:
    """BusyError or ConfigError where this process cannot listen at its endpoint."""
    try:
        network.listen(*network.endpoint(endpoint, "strategy.endpoints")).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BusyError(
                f"strategy.endpoints: {endpoint} is taken by another process; is server {server} of this run at work "
                "already?"
            ) from None
        said = f"strategy.endpoints: {endpoint} cannot be listened on: {error.strerror or error}"
        raise ConfigError(
            f"{said}; is this host really that of strategy.server_id={server}, and are the endpoints in order?"
        ) from None


def _arrive(standing: RendezvousContext, strategy: PserverOptions, post: Post, service: Service) -> RendezvousContext:
    """A server other than 0 is told where it is."""
    place, endpoints = standing.place, strategy.where()
    service.epoch = UNKNOWN
    service.add({MEET: not_here(place.rank)})
    service.start()
    guest = Guest(
        Client(endpoints[0], place.token, UNKNOWN, tls=tls(strategy)), place.rank, len(endpoints), standing.facts
    )
    told = guest.arrive(strategy.patience_s, standing.wait, standing.say)
    service.epoch = told.epoch
    post.look = lambda: guest.look(_patience_s(strategy))
    standing.say(f"server {place.rank} takes part in {told.folder}; server 0, on {told.host}, reports")
    return replace(
        standing,
        place=replace(place, store=told.store, prefix=told.epoch),
        folder=Path(told.folder),
        run_id=told.run_id,
    )


def serve(task: Task, world: World, strategy: PserverOptions, trainers: int, post: Post) -> Program:
    """The program of a server, with its service running. Collective over the servers."""
    serving = Serving(task, world, strategy, strategy.merging(), trainers)
    place = world.place
    desk = Desk(serving, task, world.facts, world.rank, place.hang_timeout_s)
    about: dict[str, Any] = {
        "mode": strategy.mode.value,
        "attempt": place.prefix,
        "folder": str(world.folder),
        "endpoints": strategy.where(),
    }
    handlers = desk.handlers | {STATUS: _status(lambda: snapshot(serving, world.rank, world.size) | about)}
    if post.service:
        service, endpoint = post.service, post.endpoint
        service.add(handlers)
    else:
        service = _service(handlers, place, strategy, trainers)
        service.start()
        endpoint = service.endpoint
        _store(place).set(f"server/{world.rank}", endpoint)
    service.on_error, service.ready = serving.fail, lambda: serving.begun
    watch = Watch(post.look, serving.fail) if post.look else None

    def close() -> None:
        if watch:
            watch.close()
        service.stop(STOP_S)

    serving.on_end(close)
    about["endpoints"] = world.gather(endpoint) or about["endpoints"]  # by hand all know them
    if world.rank == 0 and world.folder.parts:
        _announce(world.folder, about["endpoints"], place, strategy)
    return serving


def _status(moment: Callable[[], dict[str, Any]]) -> Callable[[bytes], bytes]:
    """The handler of STATUS of a server that begins now."""
    began = time.monotonic()

    def status(data: bytes) -> bytes:
        found = moment() | {"uptime_s": round(time.monotonic() - began, 6)}
        return encode(messages.status_schemas()[1], {}, {"status": np.frombuffer(json.dumps(found).encode(), np.uint8)})

    return status


def _announce(folder: Path, endpoints: list[str], place: Place, strategy: PserverOptions) -> None:
    announce(folder, Live(endpoints, viewer(place.token), strategy.tls.files(), strategy.tls.mutual))


def train(task: Task, errand: RoleContext, strategy: PserverOptions, trainers: int) -> None:
    """A trainer's life. PeerError when a server is gone; by hand, when servers do not come back."""
    place, endpoints = errand.place, strategy.where()
    number, member = divmod(place.rank - strategy.count(), strategy.team)
    if endpoints:
        _ByHand(task, errand, strategy, trainers, number).run()
        return
    if strategy.team == 1:
        work(task, errand, strategy, trainers, number, servers(place, strategy))
        return
    team = _team(errand, number, Shard(member, strategy.team))
    if member:
        follow(task, errand, team, strategy.merging().shares(trainers))
        return
    errand = replace(errand, stop_requested=lambda told=errand.stop_requested: told() or team.stopping)
    work(task, errand, strategy, trainers, number, servers(place, strategy), team)
    team.dismiss()


def _team(errand: RoleContext, number: int, part: Shard) -> Team:
    """Of the trainer `number`."""
    place = errand.place
    store = PrefixStore(f"trainer/{number}", _store(place))
    return Team(store, part, torch.device(place.device), lambda: errand.beat("start", 0), place.start_timeout_s / 2)


def lend(
    task: Task,
    errand: RoleContext,
    strategy: PserverOptions,
    trainers: int,
    read: Callable[[Path], Source],
    write: Write,
) -> None:
    """The life of a server of rows alone."""
    place, store = errand.place, _store(errand.place)
    number, count = place.rank - trainers, strategy.count()
    shelves = shelves_of(task, World(Place(rank=number, size=count)))
    assert shelves is not None
    lending = Lending(shelves, task.recipe, trainers, place.rank, errand.folder, read, write)
    about: dict[str, Any] = {
        "server": number,
        "servers": count,
        "mode": strategy.mode.value,
        "attempt": place.prefix,
        "folder": str(errand.folder),
    }
    service = _service(
        lending.handlers | {STATUS: _status(lambda: lending.snapshot() | about)}, place, strategy, trainers
    )
    service.on_error = lending.fail
    service.start()
    try:
        store.set(f"server/{number}", service.endpoint)
        if number == 0:
            about["endpoints"] = _endpoints(store, count)
            _announce(errand.folder, about["endpoints"], place, strategy)
        lending.run(errand.beat, errand.stop_requested)
    finally:
        service.stop(STOP_S)


def servers(place: Place, strategy: PserverOptions) -> list[Retrying]:
    """What carries requests to each server that the launcher started."""
    endpoints = _endpoints(_store(place), strategy.count())
    return [
        Retrying(Shared(Client(endpoint, place.token, place.prefix, tls=tls(strategy))), PATIENCE_S)
        for endpoint in endpoints
    ]


class _ByHand:
    """A trainer that nobody restarts with the servers: it waits for them, and goes on with those that come after
    them.
    """

    def __init__(self, task: Task, errand: RoleContext, strategy: PserverOptions, trainers: int, number: int) -> None:
        self._task, self._errand, self._strategy, self._trainers, self._number = (
            task,
            errand,
            strategy,
            trainers,
            number,
        )
        self._endpoints, self._loaders = strategy.where(), list[Any]()
        self._until = 0.0
        self._guest = Guest(self._client(0, UNKNOWN), NOBODY, len(self._endpoints), {"config": errand.facts["config"]})

    def run(self) -> None:
        """To the end of the run.

        Preempted when this trainer or the run was told to stop, BudgetError when its budget is spent.
        """
        reason = self._live()
        if reason == "preempted":
            raise Preempted(
                "the run was asked to stop; start its servers again with the same run.dir, and its trainers, to go on"
            )
        if reason == "budget":
            raise BudgetError("the budget of the run is spent; see what server 0 says")

    def _live(self) -> str:
        """Why the run is over."""
        self._until = time.monotonic() + self._strategy.patience_s
        before, quiet_until = "", time.monotonic() + QUIET_S
        while True:
            left = self._until - time.monotonic()
            told = self._guest.arrive(max(0.0, left), lambda: self._beat("wait", 0), self._errand.say)
            clients = [self._client(server, told.epoch) for server in range(len(self._endpoints))]
            try:
                for server, client in enumerate(clients):
                    _await(server, client)
                if before != told.epoch:
                    self._errand.say(
                        f"trainer {self._number} takes part in {told.folder}, on {told.host}; server 0 reports"
                    )
                before = told.epoch
                return self._work(clients)
            except PeerError as error:
                if time.monotonic() > self._until:
                    raise Absent(
                        f"no step was finished within strategy.meet_timeout_s={self._strategy.patience_s:g}: {error}"
                    ) from None
                if before == told.epoch:
                    self._errand.say(f"{error}; waiting for the servers to come back")
                elif time.monotonic() > quiet_until:
                    self._errand.say(f"waiting for the servers: {error}")
                    quiet_until = self._until
            except Preempted:
                self._leave(clients[0])
                raise
            finally:
                for each in (*clients, *self._loaders):
                    each.close()
                self._loaders.clear()

    def _work(self, clients: list[Client]) -> str:
        errand = replace(self._errand, beat=self._beat, stop_requested=lambda: False, open=self._open)
        servers = [Retrying(Shared(client), _patience_s(self._strategy)) for client in clients]
        return work(self._task, errand, self._strategy, self._trainers, self._number, servers)

    def _beat(self, phase: str, step: int) -> None:
        self._errand.beat(phase, step)
        if self._errand.stop_requested():
            raise Preempted("this trainer was asked to stop and has left; the others go on with its work")
        if phase == "step":
            self._until = time.monotonic() + self._strategy.patience_s

    def _leave(self, server: Client) -> None:
        """Let others have what this one has not done, at once."""
        for trainer in numbers(self._number, self._strategy):
            request = {
                "trainer": trainer,
                "starter": self._errand.place.starter,
                "most": 0,
                "wait_s": 0.0,
                "stopping": 0,
                "leaving": 1,
            }
            with suppress(DtfError):
                server.call(
                    LEASE,
                    encode(messages.lease_schemas()[0], request, {"done": np.empty((0, 3), np.int64)}),
                    PATIENCE_S,
                )

    def _open(self, split: str, shard: Shard, rows: int) -> Batches:
        self._loaders.append(self._errand.open(split, shard, rows))
        return self._loaders[-1]

    def _client(self, server: int, epoch: str) -> Client:
        return Client(self._endpoints[server], self._errand.place.token, epoch, tls=tls(self._strategy))


def _patience_s(strategy: PserverOptions) -> float:
    """By hand, for what is lost to arrive after all: no longer than servers are waited for."""
    return min(PATIENCE_S, strategy.patience_s)


def _await(server: int, client: Client) -> None:
    """Return as soon as the server is ready; Lost, in words, when it is not within a moment."""
    try:
        client.wait_ready(READY_S)
    except Lost:
        raise Lost(
            f"server {server} is not ready at {client.endpoint}; is it started, and is that where strategy.endpoints "
            "has it everywhere?"
        ) from None


def _service(
    handlers: Handlers, place: Place, strategy: PserverOptions, trainers: int, address: str = "127.0.0.1:0"
) -> Service:
    return Service(
        handlers,
        place.token,
        place.prefix,
        address,
        threads=strategy.rpc_threads or 4 + 2 * trainers,
        tls=tls(strategy),
        allow_insecure=strategy.allow_insecure,
        ageless=(MEET, STATUS),
        shown=(STATUS,),
    )


def tls(strategy: PserverOptions) -> Tls | None:
    """What `strategy.tls` says."""
    files = {name: Path(path) for name, path in strategy.tls.files().items()}
    return Tls(**files, mutual=strategy.tls.mutual) if files else None


def _gather(host: Host, patience_s: float, standing: RendezvousContext, endpoints: list[str]) -> None:
    """Wait until all servers are there."""
    start, said = time.monotonic(), False
    while not host.complete():
        standing.wait()
        waited, missing = (
            time.monotonic() - start,
            ", ".join(f"server {server} (at {endpoints[server]})" for server in host.missing()),
        )
        missing = missing or "servers that came and have gone"
        if waited > patience_s:
            raise Absent(f"{missing} did not come within strategy.meet_timeout_s={patience_s:g}")
        if waited > QUIET_S and not said:
            standing.say(f"server 0 waits for {missing}")
            said = True
        time.sleep(ASK_S)


def _endpoints(store: PrefixStore, servers: int) -> list[str]:
    """Of all servers, once they are there."""
    return [store.get(f"server/{server}").decode() for server in range(servers)]


def _store(place: Place) -> PrefixStore:
    host, _, port = place.store.rpartition(":")
    return PrefixStore(
        place.prefix, TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=place.start_timeout_s))
    )
