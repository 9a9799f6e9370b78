"""How a server or a trainer begins: it gets its service or its transports, then its program or its loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import PrefixStore

from dtf.api.helper_roles import RoleContext
from dtf.api.strategy import Program
from dtf.api.task import Source, Task
from dtf.core.endpoint_file import EndpointFile, announce
from dtf.core.types import ManualStart, Place, Shard
from dtf.distributed.world import World
from dtf.pserver import connections
from dtf.pserver.discovery import LivenessMonitor
from dtf.pserver.manual_rendezvous import ManualTrainer, ServerBootstrap
from dtf.pserver.net import messages
from dtf.pserver.net.codec import encode
from dtf.pserver.net.messages import STATUS
from dtf.pserver.net.rpc import viewer
from dtf.pserver.row_routing import server_shards
from dtf.pserver.server.handlers import Servicer
from dtf.pserver.server.program import ServerProgram
from dtf.pserver.server.rows_server import RowServer, Write
from dtf.pserver.server.status import snapshot
from dtf.pserver.trainer.group import TrainerGroup
from dtf.pserver.trainer.group_compute import run_follower
from dtf.pserver.trainer.hogwild import run_trainers

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

STOP_S = 1.0
"""How long requests under way may take when a service stops."""


def serve(task: Task, world: World, strategy: PserverOptions, trainers: int, bootstrap: ServerBootstrap) -> Program:
    """The program of a server, with its service running. Collective over the servers.

    `trainers`: how many there are in all. `bootstrap`: what `rendezvous` has made.
    """
    program = ServerProgram(task, world, strategy, strategy.sync_mode(task), trainers)
    place = world.place
    servicer = Servicer(program, task, world.facts, world.rank, place.hang_timeout_s)
    constants: dict[str, Any] = {
        "mode": strategy.mode.value,
        "attempt": place.prefix,
        "folder": str(world.folder),
        "endpoints": list(place.manual.endpoints) if place.manual else [],
    }
    status = _status_handler(lambda: snapshot(program, world.rank, world.size) | constants)
    handlers = servicer.handlers | {STATUS: status}
    if bootstrap.service:
        service, endpoint = bootstrap.service, bootstrap.endpoint
        service.add(handlers)
    else:
        service = connections.make_service(handlers, place, trainers)
        service.start()
        endpoint = service.endpoint
        connections.publish_endpoint(connections.launcher_store(place), world.rank, endpoint)
    service.on_error, service.ready = program.fail, lambda: program.begun
    program.while_waiting = bootstrap.while_waiting or program.while_waiting
    monitor = LivenessMonitor(bootstrap.failure, program.fail) if bootstrap.failure else None

    def close() -> None:
        if monitor:
            monitor.close()
        service.stop(STOP_S)

    program.on_end(close)
    # on ranks other than 0 `gather` gives None; servers that were started manually know all endpoints already
    constants["endpoints"] = world.gather(endpoint) or constants["endpoints"]
    if world.rank == 0 and world.folder.parts:
        _announce(world.folder, constants["endpoints"], place)
    return program


def _status_handler(snapshot: Callable[[], dict[str, Any]]) -> Callable[[bytes], bytes]:
    """The handler of STATUS; the uptime that it reports counts from this call."""
    began = time.monotonic()

    def status(data: bytes) -> bytes:
        values = snapshot() | {"uptime_s": round(time.monotonic() - began, 6)}
        text = np.frombuffer(json.dumps(values).encode(), np.uint8)
        return encode(messages.status_schemas()[1], {}, {"status": text})

    return status


def _announce(folder: Path, endpoints: list[str], place: Place) -> None:
    manual = place.manual or ManualStart()
    announce(folder, EndpointFile(endpoints, viewer(place.token), manual.tls, manual.mutual_tls))


def train(task: Task, context: RoleContext, strategy: PserverOptions, trainers: int) -> None:
    """Run a trainer process to the end of the run. `trainers`: how many there are in all.

    PeerError when a server is lost; for a trainer that was started manually, when servers do not come back.
    """
    place = context.place
    number, member = divmod(place.rank - strategy.servers, strategy.team)
    if place.manual is not None:
        ManualTrainer(task, context, strategy, trainers, number).run()
        return
    if strategy.team == 1:
        run_trainers(task, context, strategy, trainers, number, connections.connect_servers(place, strategy.servers))
        return
    team = _join_team(context, number, Shard(member, strategy.team))
    if member:
        run_follower(task, context, team, strategy.sync_mode(task).shares(trainers))
        return
    stop_requested = context.stop_requested
    context = replace(context, stop_requested=lambda: stop_requested() or team.stopping)
    run_trainers(task, context, strategy, trainers, number, connections.connect_servers(place, strategy.servers), team)
    team.send_end()


def _join_team(context: RoleContext, number: int, part: Shard) -> TrainerGroup:
    """The processes of trainer `number`, once all of them are there."""
    place = context.place
    store = PrefixStore(f"trainer/{number}", connections.launcher_store(place))
    return TrainerGroup(store, part, torch.device(place.device), lambda: context.beat("start", 0))


def serve_rows(
    task: Task,
    context: RoleContext,
    strategy: PserverOptions,
    trainers: int,
    read: Callable[[Path], Source],
    write: Write,
) -> None:
    """Run a server of rows alone (`strategy.dense=allreduce`) to the end of the run.

    `read`, `write`: of checkpoint files, see `RowServer`.
    """
    place, store = context.place, connections.launcher_store(context.place)
    number, count = place.rank - trainers, strategy.servers
    shards = server_shards(task, World(Place(rank=number, size=count)))
    assert shards is not None
    row_server = RowServer(shards, task.recipe, trainers, place.rank, context.folder, read, write)
    constants: dict[str, Any] = {
        "server": number,
        "servers": count,
        "mode": strategy.mode.value,
        "attempt": place.prefix,
        "folder": str(context.folder),
    }
    status = _status_handler(lambda: row_server.snapshot() | constants)
    service = connections.make_service(row_server.handlers | {STATUS: status}, place, trainers)
    service.on_error = row_server.fail
    service.start()
    try:
        connections.publish_endpoint(store, number, service.endpoint)
        if number == 0:
            constants["endpoints"] = connections.read_endpoints(store, count)
            _announce(context.folder, constants["endpoints"], place)
        row_server.run(context.beat, context.stop_requested)
    finally:
        service.stop(STOP_S)
