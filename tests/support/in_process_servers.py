"""Servers and trainers of one run without gRPC: trainers are threads of rank 0, which call its server's handlers, and
those of other ranks by a socket.
"""

from __future__ import annotations

import itertools
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, wraps
from multiprocessing.connection import Client as Connection
from multiprocessing.connection import Listener
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from dtf.api.helper_roles import RoleContext
from dtf.api.strategy import Program, Strategy
from dtf.api.task import Task
from dtf.core.types import Batch, Place
from dtf.model.receive import Receiver
from dtf.pserver.net import shared_memory
from dtf.pserver.net.codec import Buffer, Parts, WireError
from dtf.pserver.net.transport import Failed, Lost, Refused, Stale, Transport
from dtf.strategies.start_check import Passes

Handlers = Mapping[str, Callable[[bytes], bytes]]
_ERRORS = (Refused, WireError, Stale, Failed, Lost)
_here: dict[str, Service] = {}
_runs = itertools.count()  # of these ranks


class Service:
    """In the place of `rpc.Service`. Errors travel as they do there, and nothing is answered after `stop`."""

    def __init__(self, handlers: Handlers, token: str, generation: str, address: str, **options: Any) -> None:
        around = shared_memory.Regions(64).around
        self._handlers, self._over = {name: around(handler) for name, handler in handlers.items()}, False
        self.on_error: Callable[[Exception], None] = lambda error: None
        self.ready: Callable[[], bool] = lambda: True
        self.endpoint = f"\0dtf-test-{uuid.uuid4().hex}"

    def start(self) -> None:
        _here[self.endpoint] = self
        listener = Listener(self.endpoint, "AF_UNIX", backlog=64)
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

    def stop(self, grace_s: float) -> None:
        self._over = True

    def answer(self, method: str, data: bytes) -> bytes:
        if self._over:
            raise Lost("the service has stopped")
        try:
            return self._handlers[method](data)
        except (Refused, WireError, Stale):
            raise
        except Exception as error:
            self.on_error(error)
            raise Failed("an error of the server") from error

    def _listen(self, listener: Listener) -> None:
        with listener:
            while True:
                threading.Thread(target=self._serve, args=(listener.accept(),), daemon=True).start()

    def _serve(self, connection: Any) -> None:
        with connection:
            method, data = connection.recv()
            try:
                connection.send(self.answer(method, data))
            except _ERRORS as error:
                connection.send(error)


class Client:
    """In the place of `rpc.Client`."""

    def __init__(self, endpoint: str, token: str, generation: str, tls: None = None) -> None:
        self._endpoint = endpoint

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> bytes:
        data = bytes(data)
        if self._endpoint in _here:
            return _here[self._endpoint].answer(method, data)
        with Connection(self._endpoint, "AF_UNIX") as connection:
            connection.send((method, data))
            answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Future[bytes]:
        future: Future[bytes] = Future()

        def run() -> None:
            try:
                future.set_result(self.call(method, data, deadline_s))
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)

        # no pool: nothing waits for these threads when the process ends
        threading.Thread(target=run, daemon=True).start()
        return future


def connect(between: Callable[[Client], Transport] = lambda client: client, least_bytes: int = 0) -> None:
    """Replace gRPC by these classes, for all servers and trainers from now on.

    `between`: wraps each client. `least_bytes`: of messages that go through shared memory.
    """
    from dtf.pserver import bootstrap, connections

    draw_in_turn()
    connections.Service, connections.Client = Service, lambda *place: between(Client(*place))  # type: ignore[assignment,misc]
    bootstrap.announce = lambda folder, live: None  # type: ignore[assignment]  # there is no run folder
    bootstrap.viewer = lambda token: token
    shared_memory.LEAST_BYTES = least_bytes
    connections.PATIENCE_S = 3.0  # nothing is away for longer
    prefix = f"servers {next(_runs)}"  # the ranks have had other runs
    # a clone for each caller: who waits on a store keeps other users of it waiting
    connections.launcher_store = lambda place: dist.PrefixStore(  # type: ignore[assignment]
        prefix, dist.distributed_c10d._get_default_store().clone()
    )


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """One call at a time, and none while another thread draws for `Recipe.receive`."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with Receiver.lock:
            return function(*arguments, **named)

    return call


@cache
def draw_in_turn() -> None:
    """What seeds torch's global generator at the start, in turn: trainers are threads here, and have one for all.

    As processes each has its own.
    """
    from dtf.model import init
    from dtf.pserver.trainer.compute import TrainerModel
    from dtf.strategies.replica import Replica

    seeded, passes = init.seeded, Replica.passes

    def passes_in_turn(self: Replica, rows: Batch) -> Passes:
        found = passes(self, rows)
        return found._replace(run=in_turn(found.run))

    @contextmanager
    def seeded_in_turn(seed: int) -> Iterator[None]:
        with Receiver.lock, seeded(seed):
            yield

    init.seeded = seeded_in_turn
    Replica.passes = passes_in_turn
    for name in ("__init__", "warmup", "trial_eval"):
        setattr(TrainerModel, name, in_turn(getattr(TrainerModel, name)))


def ask_again_soon() -> None:
    """Where answers are lost and processes die, a trainer asks again sooner than it usually does."""
    from dtf.pserver.trainer import prefetch, trainer

    prefetch.WAIT_S = trainer.WAIT_S = 0.3


class Killed(BaseException):
    """A trainer was killed."""


class Life:
    """One trainer from its start until it is killed, at a request chosen by a seed: before it is sent, or after its
    answer.
    """

    current = threading.local()

    def __init__(self, random: Random, chance: float) -> None:
        self._random, self._chance, self._dead, self._lock = random, chance, False, threading.Lock()

    def kill(self) -> None:
        self._dead = True

    def risk(self) -> None:
        with self._lock:
            self._dead = self._dead or self._random.random() < self._chance
        if self._dead:
            raise Killed


class KillableTransport:
    """A transport of a trainer that may be killed."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self._life = inner, Life.current.value

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> Buffer:
        self._life.risk()
        answer = self._inner.call(method, data, deadline_s)
        self._life.risk()
        return answer

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Any:
        self._life.risk()
        return self._inner.start(method, data, deadline_s)


class HelperThreads:
    """The processes of all roles but the first, as threads of this one; the program fails when one of them does.

    With `deaths`, a seed, each is killed at most `lives` - 1 times and started again.
    """

    lives, chance = 3, 0.1

    def __init__(
        self,
        strategy: Strategy,
        task: Task,
        slots: int,
        open_rows: Callable[..., Any],
        program: Program,
        deaths: int | None = None,
    ) -> None:
        self.died = 0
        self._deaths = deaths
        leading, *others = strategy.roles(slots).items()
        ranks = range(leading[1], sum(count for _, count in (leading, *others)))
        names = [role for role, count in others for _ in range(count)]
        self._strategy, self._task, self._program = strategy, task, program
        contexts = [
            RoleContext(
                Place(rank=rank, size=ranks.stop, role=role, slots=slots),
                {},
                open_rows,
                lambda phase, step: None,
                lambda: False,
                folder=Path("/"),
            )
            for rank, role in zip(ranks, names, strict=True)
        ]
        self._threads = [threading.Thread(target=self._live, args=(context,), daemon=True) for context in contexts]
        for thread in self._threads:
            thread.start()

    def _live(self, context: RoleContext) -> None:
        torch.set_num_threads(1)
        random = Random(f"{self._deaths} {context.place.rank}")
        try:
            for life in range(self.lives):
                Life.current.value = Life(
                    random, self.chance if self._deaths is not None and life + 1 < self.lives else 0.0
                )
                try:
                    return self._strategy.helper_roles.run(self._task, context)
                except Killed:
                    self.died += 1
        except Failed:
            traceback.print_exc()  # the server that failed says why
        except BaseException as error:  # noqa: BLE001
            traceback.print_exc()
            self._program.fail(error)  # type: ignore[attr-defined]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a trainer does not end"
