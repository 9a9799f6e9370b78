"""A server in this process with its engine in a thread, and requests to its handlers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dtf.api.options import StepOptions
from dtf.api.recipe import Recipe
from dtf.api.task import Task
from dtf.core.types import Place, Train
from dtf.distributed.world import World
from dtf.optim.optimizers import Sgd
from dtf.pserver.net import messages
from dtf.pserver.net.codec import decode, encode
from dtf.pserver.net.messages import EXCHANGE, HELLO, LEASE
from dtf.pserver.options import Mode
from dtf.pserver.param_slices import views
from dtf.pserver.push import Push
from dtf.pserver.server.handlers import Servicer
from dtf.pserver.server.program import ServerProgram
from dtf.pserver.strategy import Pserver
from dtf.sparse.row_optimizers import RowAdagrad
from tests.support.harness import PRECISIONS
from tests.support.toy import Toy

SOON_S = 20.0


@contextmanager
def server(
    mode: Mode = Mode.sync, trainers: int = 2, recipe: Recipe | None = None, **options: Any
) -> Iterator[tuple[ServerProgram, Servicer, ThreadPoolExecutor]]:
    """One server with its servicer, and a thread for the engine."""
    recipe = recipe or Toy(batch_norm=False)
    task = Task(recipe, Sgd(), PRECISIONS["fp64"], StepOptions(batch_size=24, micro_batch_rows=6), 0, rows=RowAdagrad())
    world, strategy = World(Place(size=1, slots=trainers)), Pserver(mode=mode, **options)
    program = ServerProgram(task, world, strategy, strategy.sync_mode(task), trainers)
    with ThreadPoolExecutor(1) as engine:
        try:
            yield program, Servicer(program, task, {}, 0, 60.0), engine
        finally:
            program.fail(RuntimeError("the test is over"))


def push(program: ServerProgram, step: int, part: int, value: float | None = None) -> Push:
    """A gradient that is the same number everywhere, another one for each push."""
    memory = torch.zeros(program.server_state.layout.bytes, dtype=torch.uint8)
    for view in views(memory, program.server_state.layout.learning):
        view.fill_(0.01 * (1 + step + 0.1 * part) if value is None else value)
    rows = np.arange(part, 24, program.shares)
    return Push(0, step, part, memory.numpy(), {}, 1, 1.0, 0, 0, 0, 0, np.array([12.0, 1.0, 1.0]), np.empty(0), rows)


def ticket(step: int) -> Train:
    return Train(step, 0, step, 24, 0.1)


def learnt(program: ServerProgram) -> bytes:
    return b"".join(box.tensor.numpy().tobytes() for box in program.state().boxes)


def steps(program: ServerProgram, count: int) -> None:
    for step in range(count):
        program.step(ticket(step), None)
    program.sync()


def in_order(count: int, mode: Mode = Mode.sync) -> bytes:
    with server(mode) as (program, _, engine):
        done = engine.submit(steps, program, count)
        for step in range(count):
            until(lambda step=step: program._last >= step)
            for part in range(program.shares):
                program.receive(push(program, step, part))
        done.result(SOON_S)
        return learnt(program)


def until(true: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < SOON_S
        time.sleep(0.001)


def pull(servicer: Servicer, after: int) -> dict[str, Any]:
    request, reply = messages.exchange_schemas(Toy())
    scalars = {"trainer": 0, "pull": 1, "after": after, "train": 1, "known": -1, "frozen": 0, "wait_s": 0.0}
    scalars |= {"of_step": after, "of_part": 0, "at": after}
    return dict(decode(reply, servicer.handlers[EXCHANGE](encode(request, scalars, {}))).scalars)


def lease(servicer: Servicer, trainer: int, **scalars: Any) -> Any:
    request, reply = messages.lease_schemas()
    keys = {"done": np.empty((0, 3), np.int64), "has": np.empty((0, 3), np.int64)}
    given = {"trainer": trainer, "most": 2, "wait_s": 0.0, "stopping": 0} | scalars
    return decode(reply, servicer.handlers[LEASE](encode(request, given, keys)))


def greet(
    servicer: Servicer,
    trainer: int,
    launch_id: str,
    facts: dict[str, Any] | None = None,
    uneven: Any = (),
    start: Any = None,
) -> Any:
    request, reply = messages.hello_schemas()
    texts = {"facts": json.dumps(facts or {}), "uneven": json.dumps(uneven)}
    if start is not None:
        texts["start"] = json.dumps(start)
    told = {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}
    return decode(reply, servicer.handlers[HELLO](encode(request, {"trainer": trainer, "starter": launch_id}, told)))


def hello(
    servicer: Servicer, trainer: int, facts: dict[str, Any] | None = None, uneven: Any = (), start: Any = None
) -> str:
    return greet(servicer, trainer, "", facts, uneven, start).arrays["refusal"].tobytes().decode()
