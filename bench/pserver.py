"""How fast a parameter server trains a click-through model: one server and one trainer, against dtf's table in one
process, on the same rows in memory.

    python -m bench.pserver                          # modes async and sync, both models of bench/ctr.py in fp32
    python -m bench.pserver --only 64-32 --modes async
    python -m bench.pserver --rows                   # rows that one thread of a server steps and looks up in a second
    python -m bench.pserver --save --ids 260000      # how long a server takes to save and load so many rows

Server and trainers are processes that talk over gRPC on loopback, as with `launcher=local`; the server runs the engine,
and the trainer has the threads of the one process. The model, the log and the turns are those of bench/ctr.py:
contestants take turns, all tables hold all rows before anything is timed, and what they lose on rows that they had not
seen before is compared at the end: sync must be the same as one process, async near it. A turn ends when its last
gradients are applied. Ratios are medians of those of each round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.distributed import TCPStore

from bench.ctr import CASES, Deep, engine, fill, processor
from bench.ctr_rivals import LR, Case, draw, opened, timed
from bench.ctr_rivals import Log as Rows
from bench.endless import Endless
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
from dtf.optim.optimizers import Adagrad
from dtf.pserver.options import Mode
from dtf.pserver.server.program import ServerProgram
from dtf.pserver.strategy import Pserver
from dtf.sparse.row_optimizers import RowAdagrad
from dtf.sparse.store import SparseTable, unique

MODELS = ("400-400-400", "64-32")
APART = {"sync": 1e-4, "async": 0.01}
"""How far a mean log loss may be from that of one process."""


def parts(log: Rows, hidden: str) -> tuple[Task, Epochs]:
    recipe = Deep(log, CASES[hidden][0])
    return Task(recipe, Adagrad(), Precision(), StepOptions(batch_size=log.batch), 0, rows=RowAdagrad()), Epochs(
        Sequential(), len(log.clicks), log.batch, 0
    )


def serve(task: Task, epochs: Epochs, place: Place, strategy: Pserver) -> None:
    """A server: it takes numbers of steps, one a line, and answers each with seconds and mean loss; at the end of the
    lines it ends the run.
    """
    world = World(replace(place, size=1))
    program = strategy.setup(task, world)
    clock, losses = Endless(epochs, LR, logs=True), []
    loader = Loader(task.recipe.open_data("train", 0), epochs, program.shard, program.micro_batch_rows)

    def see(event: Event) -> None:
        if isinstance(event, Measured):
            losses.append(event.values["loss"])

    loop = Loop(program, clock, loader, loader, 0, task.recipe, world, None, see, {}, epochs.batches)

    def run(steps: int) -> float:
        clock.turn(steps)
        fit(loop)
        return losses[-1]

    for line in sys.stdin:
        if line.strip() == "fill":
            fill(program.server_state._shards._shards["ids"].store)  # type: ignore[attr-defined]
            print("full", flush=True)
        else:
            print(*timed(run, int(line)), flush=True)
    program.leased.end()


def train(task: Task, epochs: Epochs, place: Place, strategy: Pserver) -> None:
    def rows(split: str, shard: Shard, micro_batch_rows: int) -> Loader:
        return Loader(task.recipe.open_data(split, 0), epochs, shard, micro_batch_rows)

    strategy.helper_roles.run(task, RoleContext(place, {}, rows, lambda phase, step: None, lambda: False))


def role(args: argparse.Namespace) -> None:
    """One process of a pair."""
    torch.set_num_threads(args.threads)
    task, epochs = parts(opened(Path(args.log)), args.only)
    strategy = Pserver(mode=Mode(args.modes[0]), servers=1)
    place = Place(
        int(args.role == "trainer"),
        2,
        role=args.role,
        threads=args.threads,
        store=args.store,
        prefix=args.modes[0],
        token="bench",
    )
    (serve if args.role == "server" else train)(task, epochs, place, strategy)


class Pair:
    """A server and its trainer."""

    def __init__(self, name: str, mode: str, log: Path, args: argparse.Namespace) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
        command = [
            sys.executable,
            "-m",
            "bench.pserver",
            "--log",
            str(log),
            "--only",
            name,
            "--modes",
            mode,
            "--store",
            f"127.0.0.1:{self._store.port}",
        ]
        self._server = subprocess.Popen(
            [*command, "--role", "server", "--threads", str(args.server_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._trainer = subprocess.Popen([*command, "--role", "trainer", "--threads", str(args.threads)])

    def turn(self, steps: int) -> tuple[float, float]:
        seconds, loss = self.send(str(steps)).split()
        return float(seconds), float(loss)

    def send(self, line: str) -> str:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(line, file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        if not answer:
            raise SystemExit("the server ended without a word")
        return answer

    def close(self) -> None:
        self._server.communicate()
        self._trainer.wait()


def compare(name: str, log: Rows, saved: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    run, store = engine(log, Case(CASES[name][0], False, args.threads))
    with ExitStack() as stack:
        pairs = {mode: Pair(name, mode, saved, args) for mode in args.modes}
        for pair in pairs.values():
            stack.callback(pair.close)
        run(args.warm)
        fill(store)
        for pair in pairs.values():
            pair.turn(args.warm)
            pair.send("fill")
        turns_of: dict[str, list[tuple[float, float]]] = {key: [] for key in ("one process", *pairs)}
        for number in range(args.rounds):
            for key in turns_of if number % 2 else reversed(turns_of):
                time.sleep(0.5)  # threads of the one before may still spin
                turns_of[key].append(pairs[key].turn(args.steps) if key in pairs else timed(run, args.steps))
    print_table(name, turns_of, args.steps, log.batch)
    for key, turns in turns_of.items():
        difference = abs(turns[-1][1] - turns_of["one process"][-1][1])
        if difference > APART.get(key, 0):
            raise SystemExit(
                f"{name}: the losses of mode {key} must be those of one process within {APART[key]:g}, they are "
                f"{difference:.6f} apart"
            )


def print_table(name: str, turns_of: dict[str, list[tuple[float, float]]], steps: int, batch: int) -> None:
    """A table of medians and ranges, of ratios to one process, and of the losses of the last turn."""
    print(
        f"\n{name:14}{'rows/s':>10} {'least to most':>20} {'of one process':>16} {'least to most':>14} "
        f"{'ms a step':>10} {'loss':>10}"
    )
    one = [seconds for seconds, _ in turns_of["one process"]]
    for key, turns in turns_of.items():
        took, loss = [seconds for seconds, _ in turns], turns[-1][1]
        rates, ratios = (
            sorted(steps * batch / seconds for seconds in took),
            sorted(base / seconds for base, seconds in zip(one, took, strict=True)),
        )
        spread, range_text = f"{rates[0]:,.0f} to {rates[-1]:,.0f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        middle = f"{statistics.median(rates):10,.0f} {spread:>20} {statistics.median(ratios):16.3f} {range_text:>14}"
        print(f"{key:14}{middle} {1e3 * statistics.median(took) / steps:10.2f} {loss:10.6f}")
    sys.stdout.flush()


def rows_alone(log: Rows, batches: int) -> None:
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


def save_and_load(log: Rows, folder: Path, rounds: int) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--modes", nargs="+", choices=list(APART), default=["async", "sync"])
    parser.add_argument("--threads", type=int, default=2, help="of torch in the one process and in the trainer")
    parser.add_argument("--server-threads", type=int, default=1, help="of torch in the server")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--ids", type=int, default=10_000_000, help="distinct ids of all fields")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=100, help="steps before the first turn")
    parser.add_argument("--rows", action="store_true", help="measure the table of a server alone")
    parser.add_argument("--save", action="store_true", help="measure saving and loading alone")
    for hidden in ("role", "log", "store"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role(args)
        return
    torch.set_num_threads(args.threads)
    print(
        f"{processor()}, {args.threads} threads, {args.server_threads} of the server, torch {torch.__version__}; "
        f"{args.ids:,} ids, batches of {args.batch}",
        flush=True,
    )
    with TemporaryDirectory() as folder:
        saved = Path(folder, "log.npz")
        log = draw(args.ids, args.batch, args.warm + args.rounds * args.steps)
        log.save(saved)
        if args.rows:
            rows_alone(log, args.rounds * args.steps // 2)
            return
        if args.save:
            save_and_load(log, Path(folder), args.rounds)
            return
        for name in [args.only] if args.only else MODELS:
            compare(name, log, saved, args)


if __name__ == "__main__":
    main()
