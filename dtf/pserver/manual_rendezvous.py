"""Servers and trainers that are started manually, each by a command of its own: how they wait for each other.

Server 0 is the coordinator: all others ask it, by MEET, which attempt of the run this is (`dtf.pserver.discovery`).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed import TCPStore

from dtf.api.helper_roles import RendezvousContext, RoleContext
from dtf.api.task import Task
from dtf.core.errors import (
    STARTED_AGAIN,
    BudgetError,
    BusyError,
    ConfigError,
    DtfError,
    Exit,
    PeerError,
    Preempted,
    code_name,
)
from dtf.core.run_record import RunEnd, run_end
from dtf.core.types import ManualStart, Shard
from dtf.host import network
from dtf.pserver.connections import PATIENCE_S, make_service, tls_files
from dtf.pserver.discovery import (
    ASK_S,
    TRAINER,
    Coordinator,
    Member,
    RendezvousInfo,
    RendezvousTimeout,
    RunStopCheck,
    WaitReport,
    named,
    refuse_rendezvous,
)
from dtf.pserver.net import messages
from dtf.pserver.net.codec import encode
from dtf.pserver.net.messages import LEASE, MEET
from dtf.pserver.net.rpc import Client, Service
from dtf.pserver.net.shared_memory import SharedMemoryTransport
from dtf.pserver.net.transport import Lost, RetryingTransport
from dtf.pserver.trainer.hogwild import run_trainers, trainer_numbers
from dtf.pserver.trainer_watch import TrainerWatch

if TYPE_CHECKING:
    from dtf.core.types import Batches
    from dtf.pserver.options import PserverOptions

READY_S = 1.0
"""How long a server may take to have its state, before server 0 is asked again whether all servers are there."""

UNKNOWN = "none"
"""In the place of a generation, for a process that does not know it yet."""


@dataclass
class ServerBootstrap:
    """What a server has before it has a state; all empty where a launcher started it."""

    service: Service | None = None  # already started
    endpoint: str = ""  # of the service
    failure: Callable[[], str] | None = None  # why this attempt of the run cannot go on, or nothing
    while_waiting: TrainerWatch | None = None  # on server 0
    store: TCPStore | None = None  # on server 0: the store of all servers, open as long as this object lives


def rendezvous(context: RendezvousContext, trainers: int) -> tuple[RendezvousContext, ServerBootstrap]:
    """Wait until all servers that were started manually are there; trainers that ask meanwhile are told to wait.

    Returns at once where a launcher starts the servers. BusyError or ConfigError where this process cannot listen,
    RendezvousTimeout when servers are missing after `launcher.timeout_s`.
    """
    place, manual = context.place, context.place.manual
    if manual is None:
        return context, ServerBootstrap()
    endpoints, facts = manual.endpoints, _facts(context)
    _check_free(endpoints[place.rank], place.rank)
    service = make_service({}, place, trainers, endpoints[place.rank])
    service.ready = lambda: False
    bootstrap = ServerBootstrap(service, endpoints[place.rank])
    if place.rank:
        return _join(context, manual, facts, bootstrap, service), bootstrap
    store = ""
    if len(endpoints) > 1:
        host = network.endpoint(bootstrap.endpoint, "launcher.endpoints")[0]
        listener = network.listen(host, 0)
        port = listener.getsockname()[1]
        store = network.endpoint_text(host, port)
        bootstrap.store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    info = RendezvousInfo(place.prefix, store, str(context.folder), context.run_id, socket.gethostname())
    coordinator = Coordinator(info, len(endpoints), facts, place.hang_timeout_s, context.stop_requested)
    service.add({MEET: coordinator.answer})
    service.start()
    _wait_for_servers(coordinator, manual, context)
    bootstrap.failure = coordinator.failure
    bootstrap.while_waiting = TrainerWatch(coordinator, context, manual.timeout_s)
    return replace(context, place=replace(place, store=store)), bootstrap


def _facts(context: RendezvousContext | RoleContext) -> dict[str, Any]:
    """What all commands of a run must have alike."""
    return {"config": context.facts["config"], "launcher.processes": context.place.slots}


def _check_free(endpoint: str, server: int) -> None:
    """BusyError or ConfigError where this process cannot listen at its endpoint."""
    try:
        network.listen(*network.endpoint(endpoint, "launcher.endpoints")).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BusyError(
                f"launcher.endpoints: {endpoint} is taken by another process; is server {server} of this run at work "
                "already?"
            ) from None
        problem = f"launcher.endpoints: {endpoint} cannot be listened on: {error.strerror or error}"
        raise ConfigError(
            f"{problem}; is this host really that of launcher.id={server}, and are the endpoints in order?"
        ) from None


def _join(
    context: RendezvousContext, manual: ManualStart, facts: dict[str, Any], bootstrap: ServerBootstrap, service: Service
) -> RendezvousContext:
    """A server other than server 0 asks server 0 where it belongs."""
    place, endpoints = context.place, manual.endpoints
    service.generation = UNKNOWN
    service.add({MEET: refuse_rendezvous(place.rank)})
    service.start()
    client = Client(endpoints[0], place.token, UNKNOWN, tls=tls_files(place))
    member = Member(client, place.rank, endpoints, facts, context.stop_requested)
    info = member.wait_complete(manual.timeout_s, context.wait, context.say)
    service.generation = info.generation
    bootstrap.failure = lambda: member.failure(_retry_s(manual))
    context.say(f"server {place.rank} takes part in {info.folder}; server 0, on {info.host}, reports")
    return replace(
        context,
        place=replace(place, store=info.store, prefix=info.generation),
        folder=Path(info.folder),
        run_id=info.run_id,
    )


def _wait_for_servers(coordinator: Coordinator, manual: ManualStart, context: RendezvousContext) -> None:
    """On server 0: wait until all servers are there. RendezvousTimeout when one is missing for too long."""
    timeout_s, endpoints = manual.timeout_s, manual.endpoints
    start, report = monotonic(), WaitReport(context.say)
    while not coordinator.complete():
        context.wait()
        missing = named(coordinator.missing(), endpoints)
        if monotonic() - start > timeout_s:
            raise RendezvousTimeout(f"{missing} did not come within launcher.timeout_s={timeout_s:g}")
        report.tell(f"server 0 waits for {missing}")
        sleep(ASK_S)


class _RunEnded(DtfError):
    """The run has ended, and its servers are gone: this process ends with the same result."""

    patient = True

    def __init__(self, folder: Path, end: RunEnd) -> None:
        again = "; to go on start its servers again, and then this trainer" if end.exit in STARTED_AGAIN else ""
        super().__init__(f"the run in {folder} has ended with {code_name(end.exit)}: {end.cause}{again}")
        self.folder, self.exit = folder, end.exit


class ManualTrainer:
    """A trainer that was started manually. It waits for the servers, and outlives them: when they are lost, it waits
    until they are started again and works on with these.
    """

    def __init__(self, task: Task, context: RoleContext, strategy: PserverOptions, trainers: int, number: int) -> None:
        self._task, self._context, self._strategy = task, context, strategy
        self._trainers, self._number, self._manual = trainers, number, context.place.manual or ManualStart()
        self._endpoints, self._loaders = self._manual.endpoints, list[Any]()
        self._deadline = 0.0  # for the next step to be made
        self._begun = monotonic()
        self._folders = dict[Path, str]()  # where the run may be, and the id of the launch that had ended there before
        if context.run_dir:
            before = run_end(Path(context.run_dir), context.facts["config"])
            self._folders[Path(context.run_dir)] = before.id if before else ""
        self._member = Member(self._client(0, UNKNOWN), TRAINER, self._endpoints, _facts(context))
        self._run_stop = RunStopCheck(self._member, context.place.grace_s / 8)

    def run(self) -> None:
        """Work to the end of the run.

        Preempted when this trainer or the run was told to stop, BudgetError when the run's budget is spent; the error
        of a run that has ended without this trainer.
        """
        try:
            reason = self._run()
        except _RunEnded as end:
            if end.exit is not Exit.OK:
                raise
            self._context.say(f"the run in {end.folder} has finished; nothing is left to do for trainer {self._number}")
            return
        if reason in ("preempted", "time_limit"):
            why = "was asked to stop" if reason == "preempted" else "has reached the time limit of its allocation"
            raise Preempted(f"the run {why}; start its servers again with the same run.dir, and its trainers, to go on")
        if reason == "budget":
            raise BudgetError("the budget of the run is spent; see what server 0 says")

    def _run(self) -> str:
        """Why the run is over. RendezvousTimeout when no step is made within `launcher.timeout_s`."""
        self._deadline = monotonic() + self._manual.timeout_s
        generation, report = "", WaitReport(self._context.say)
        while True:
            left_s = max(0.0, self._deadline - monotonic())
            info = self._member.wait_complete(left_s, self._wait, self._context.say)
            self._folders.setdefault(Path(info.folder), "")
            clients = [self._client(server, info.generation) for server in range(len(self._endpoints))]
            try:
                for server, client in enumerate(clients):
                    _wait_ready(server, client)
                if generation != info.generation:
                    self._context.say(
                        f"trainer {self._number} takes part in {info.folder}, on {info.host}; server 0 reports"
                    )
                generation = info.generation
                return self._work(clients)
            except PeerError as error:
                if monotonic() > self._deadline:
                    timeout = f"launcher.timeout_s={self._manual.timeout_s:g}"
                    raise RendezvousTimeout(f"no step was finished within {timeout}: {error}") from None
                if generation == info.generation:
                    self._context.say(f"{error}; waiting for the servers to come back")
                else:
                    report.tell(f"waiting for the servers: {error}")
            except Preempted:
                self._leave(clients[0])
                raise
            finally:
                for resource in (*clients, *self._loaders):
                    resource.close()
                self._loaders.clear()

    def _wait(self) -> None:
        """Called while it looks for the servers. _RunEnded where there is nothing to look for.

        A run that lost a server, or ended before this trainer began, may be starting again: it is waited for, though
        not for long where it ended for good.
        """
        self._context.beat("wait", 0)
        if self._context.stop_requested():
            raise Preempted("this trainer was asked to stop, and had no work")
        waited_s = monotonic() - self._begun
        for folder, before in self._folders.items():
            end = run_end(folder, self._context.facts["config"])
            if end is None:
                continue
            for_good = end.exit not in STARTED_AGAIN
            new, waited = end.id != before, waited_s > self._context.place.hang_timeout_s
            # a run that was told to stop had its trainers told, too
            if end.exit is Exit.OK or (new and (for_good or end.exit is Exit.PREEMPTED)) or (for_good and waited):
                raise _RunEnded(folder, end)

    def _work(self, clients: list[Client]) -> str:
        context = replace(self._context, beat=self._beat, stop_requested=lambda: False, open=self._open)
        retry_s = _retry_s(self._manual)
        servers = [RetryingTransport(SharedMemoryTransport(client), retry_s) for client in clients]
        return run_trainers(self._task, context, self._strategy, self._trainers, self._number, servers)

    def _beat(self, phase: str, step: int) -> None:
        self._context.beat(phase, step)
        if self._context.stop_requested() and not self._run_stop.may_stay():
            raise Preempted("this trainer was asked to stop and has left; the others go on with its work")
        if phase == "step":
            self._deadline = monotonic() + self._manual.timeout_s

    def _leave(self, server: Client) -> None:
        """Give back all leases, so that other trainers get them at once."""
        for trainer in trainer_numbers(self._number, self._strategy):
            request = {
                "trainer": trainer,
                "starter": self._context.place.launch_id,
                "most": 0,
                "wait_s": 0.0,
                "stopping": 0,
                "leaving": 1,
            }
            data = encode(messages.lease_schemas()[0], request, {"done": np.empty((0, 3), np.int64)})
            with suppress(DtfError):
                server.call(LEASE, data, PATIENCE_S)

    def _open(self, split: str, shard: Shard, rows: int) -> Batches:
        self._loaders.append(self._context.open(split, shard, rows))
        return self._loaders[-1]

    def _client(self, server: int, generation: str) -> Client:
        token = self._context.place.token
        return Client(self._endpoints[server], token, generation, tls=tls_files(self._context.place))


def _retry_s(manual: ManualStart) -> float:
    """For how long a lost request is sent again: no longer than servers are waited for."""
    return min(PATIENCE_S, manual.timeout_s)


def _wait_ready(server: int, client: Client) -> None:
    """Return as soon as the server is ready. Lost when it is not within READY_S."""
    try:
        client.wait_ready(READY_S)
    except Lost:
        raise Lost(
            f"server {server} is not ready at {client.endpoint}; is it started, and is that where launcher.endpoints "
            "has it everywhere?"
        ) from None
