"""One process of `bench.pserver`: dtf in one process, or a server or a trainer of parameter servers.

The processes that run the engine take turns, as contestants do; see `bench.turns`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.ctr import CASES, Deep, Optimizers, engine, fill
from bench.ctr_rivals import DIM, LR, Case, Log
from bench.endless import Endless
from bench.turns import Turns, contestant
from dtf.api.helper_roles import RoleContext
from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.options import Every
from dtf.core.types import Event, Measured, Place, Shard
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.engine.loop import Loop, fit
from dtf.optim.optimizers import Adam
from dtf.pserver.net.rpc import Client, Service
from dtf.pserver.options import Mode
from dtf.pserver.server.program import ServerProgram
from dtf.pserver.strategy import Pserver
from dtf.sparse.id_arrays import unique
from dtf.sparse.row_optimizers import LazyAdam, RowAdagrad
from dtf.sparse.store import SparseTable

ADAM = Optimizers(Adam(), LazyAdam(), 0.001)
ALONE, SERVER, TRAINER, ECHO = "alone", "server", "trainer", "echo"


def save(log: Log, folder: Path) -> None:
    """Write the rows so that processes share the memory of what they read."""
    for name in ("ids", "dense", "clicks"):
        np.save(folder / f"{name}.npy", getattr(log, name))
    (folder / "log.json").write_text(json.dumps({"sizes": log.sizes, "batch": log.batch}))


def saved(folder: Path) -> Log:
    """What `save` wrote. Private, so that nobody writes to the file, though torch may take the memory as writable."""
    about = json.loads((folder / "log.json").read_text())
    ids, dense, clicks = (np.load(folder / f"{name}.npy", mmap_mode="c") for name in ("ids", "dense", "clicks"))
    return Log(about["sizes"], ids, dense, clicks, about["batch"])


def parts(log: Log, hidden: str) -> tuple[Task, Epochs]:
    """What is trained, and in which batches."""
    recipe = Deep(log, CASES[hidden][0])
    options = StepOptions(batch_size=log.batch)
    task = Task(recipe, ADAM.parameters, Precision(), options, 0, rows=ADAM.rows)
    return task, Epochs(Sequential(), len(log.clicks), log.batch, 0)


def serve(task: Task, epochs: Epochs, place: Place, strategy: Pserver, turns: Turns) -> None:
    """A server, which runs the engine. After the last turn it ends the run."""
    world = World(replace(place, size=1))
    program = strategy.setup(task, world)
    assert isinstance(program, ServerProgram)
    clock, losses = Endless(epochs, ADAM.lr, logs=True, flush=program.sync), []
    loader = Loader(task.recipe.open_data("train", 0), epochs, program.shard, program.micro_batch_rows)

    def see(event: Event) -> None:
        if isinstance(event, Measured):
            losses.append(event.values["loss"])

    loop = Loop(program, clock, loader, loader, 0, task.recipe, world, None, see, {}, epochs.batches)

    def run(steps: int) -> float:
        clock.turn(steps)
        fit(loop)
        return losses[-1]

    turns.ready()
    turns.serve(run)
    program.leased.end()


def train(task: Task, epochs: Epochs, place: Place, strategy: Pserver) -> None:
    def rows(split: str, shard: Shard, micro_batch_rows: int) -> Loader:
        return Loader(task.recipe.open_data(split, 0), epochs, shard, micro_batch_rows)

    strategy.helper_roles.run(task, RoleContext(place, {}, rows, lambda phase, step: None, lambda: False))


def rows_alone(log: Log, batches: int) -> None:
    """What a server does with the rows of batches, each once, in one thread, with all rows of the table there."""
    table = Deep(log, ()).tables()["ids"]
    store = SparseTable(table, RowAdagrad(), 0, "ids")
    fill(store)
    starts = np.cumsum([0, *log.sizes[:-1]])
    rates: dict[str, list[float]] = {"step": [], "look up": []}
    for number in range(2 * batches):
        ids = unique((log.ids[number * log.batch : (number + 1) * log.batch] + starts).reshape(-1))[0]
        gradients = np.full((len(ids), table.width), 1e-3, np.float32)
        started = time.perf_counter()
        if number < batches:
            store.update(ids, gradients, LR, 1.0, number)
        else:
            store.lookup(ids, True)
        rates["step" if number < batches else "look up"].append(len(ids) / (time.perf_counter() - started))
    for name, values in rates.items():
        low, middle, high = (1e-6 * rate for rate in (min(values), statistics.median(values), max(values)))
        print(
            f"{name:8} {middle:7.1f} million rows of {table.width} numbers a second, {low:.1f} to {high:.1f}; of "
            f"{len(store):,}"
        )


def save_and_load(log: Log, folder: Path, rounds: int) -> None:
    """Seconds in which a server writes a checkpoint with all rows of the log, and another one reads it."""
    task, _ = parts(log, "64-32")

    def server() -> tuple[ServerProgram, World]:
        world, strategy = World(Place(slots=2)), Pserver()
        return ServerProgram(task, world, strategy, strategy.sync_mode(task), 1), world

    full, world = server()
    fill(full.server_state._shards._shards["ids"].store)  # type: ignore[union-attr]
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    rows = 0
    for number in range(rounds):
        checkpointer = Checkpointer(folder / str(number), Every(), world, "bench", ("loss", "min"), "pserver")
        started = time.perf_counter()
        state = full.state()
        checkpointer.save(1, state, {"program": state.scalars})
        seconds["save"].append(time.perf_counter() - started)
        empty, checkpoint = server()[0], checkpointer.find(0)
        assert checkpoint is not None
        started = time.perf_counter()
        source = checkpointer.load(checkpoint)
        source.scalars = source.scalars["program"]
        empty.load(source)
        seconds["load"].append(time.perf_counter() - started)
        rows = empty.server_state.tables()["ids"]["rows"]
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:8} {middle:7.2f} s, {min(values):.2f} to {max(values):.2f}; {rows:,} rows with their state")


def echo(turns: Turns) -> None:
    """A service of dtf that answers each request with itself; says where it listens, and ends with its input."""
    service = Service({"echo": lambda data: data}, "bench", "bench")
    service.start()
    turns.ready(endpoint=service.endpoint)
    turns.begin()
    service.stop(0.1)


def least_exchange_s(log: Log, hidden: str, endpoint: str) -> float:
    """Seconds that the requests of a step of `sync` take at least: each of its bytes is copied once, into memory that
    is warm, and an empty request goes to `endpoint` and back.
    """
    task, _ = parts(log, hidden)
    dense = sum(4 * parameter.numel() for parameter in task.recipe.build_model().parameters())
    starts, medians = np.cumsum([0, *log.sizes[:-1]]), []
    for number in range(min(20, len(log.clicks) // log.batch)):
        ids = (log.ids[number * log.batch : (number + 1) * log.batch] + starts).reshape(-1)
        rows = len(np.unique(ids))
        size = 2 * dense + rows * (8 + 8 + 2 * 4 * DIM)  # gradients and ids; the ids of the next step; rows
        source, into = np.ones(size, np.uint8), np.ones(size, np.uint8)
        medians.append(statistics.median(_timed(lambda a=source, b=into: np.copyto(b, a)) for _ in range(11)))
    client = Client(endpoint, "bench", "bench")
    trips = [_timed(lambda: client.call("echo", b"", 10.0)) for _ in range(300)]
    client.close()
    return statistics.median(medians) + statistics.median(trips)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(turns: Turns) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=[ALONE, SERVER, TRAINER, ECHO])
    parser.add_argument("log", type=Path, help="folder that `save` wrote")
    parser.add_argument("hidden", choices=CASES)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="sync")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--hogwild", type=int, default=1)
    parser.add_argument("--number", type=int, default=0, help="of the trainer")
    parser.add_argument("--store", default="", help="HOST:PORT of the launcher's store")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.role == ECHO:
        echo(turns)
        return
    log = saved(args.log)
    if args.role == ALONE:
        torch.manual_seed(0)
        run, _ = engine(log, Case(CASES[args.hidden][0], False, args.threads), ADAM)
        turns.ready()
        turns.serve(run)
        return
    task, epochs = parts(log, args.hidden)
    strategy = Pserver(mode=Mode(args.mode), servers=1, hogwild_threads=args.hogwild)
    place = Place(
        args.number + 1 if args.role == TRAINER else 0,
        1 + args.trainers,
        role=args.role,
        slots=args.trainers,
        threads=args.threads,
        store=args.store,
        prefix="bench",
        token="bench",
    )
    if args.role == SERVER:
        serve(task, epochs, place, strategy, turns)
    else:
        train(task, epochs, place, strategy)


if __name__ == "__main__":
    contestant(main)
