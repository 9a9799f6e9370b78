"""How fast parameter servers train a click-through model on one host, against dtf in one process and Paddle's
parameter server, on the same rows in memory.

    python -m bench.pserver                          # both models of bench/ctr.py in fp32
    python -m bench.pserver --only 64-32 --no-paddle
    python -m bench.pserver --rows                   # rows that one thread of a server steps and looks up in a second
    python -m bench.pserver --save --ids 260000      # how long a server takes to save and load so many rows

The trainers are those of strategy.trainers=auto for this host, beside one server. Servers and trainers are processes
that talk as with launcher=local; the server runs the engine. All step Adam, and rows when they are touched: Paddle's
server has no other for rows. They are not the same: dtf's lazy Adam corrects its bias by the steps of the run, Paddle's
by the steps of the row. Paddle's environment is in the user's cache directory, made where it is not there.

Contestants take short turns, in each round in the other direction. Nobody's table is filled before: rows are made as
they first come. A turn of dtf ends when its last gradients are applied, one of Paddle when they are on their way; each
of Paddle's begins with the start of `train_from_dataset`, which its settings tell. What they lose on rows that they had
not seen before is compared at the end with the loss of one process: that of sync must be within 1e-4 of it, relative,
that of async within 5 %, that of Paddle within 15 %; who is not has no figures. Processor time is that of all processes
of a contestant.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed import TCPStore

from bench.contest import Running, Turn, apart, contest
from bench.ctr import CASES
from bench.ctr_rivals import draw
from bench.medians import machine
from bench.peers import Absent, python_of
from bench.processes import Process, answers
from bench.pserver_processes import (
    ALONE,
    ECHO,
    SERVER,
    TRAINER,
    least_exchange_s,
    rows_alone,
    save,
    save_and_load,
    saved,
)
from bench.rows import Row, table, with_ratios
from dtf.host.devices import cores
from dtf.host.network import listen
from dtf.pserver.host_layout import MOST_TRAINERS, host_layout
from dtf.pserver.options import Mode

STEPS = {"64-32": 80, "400-400-400": 12}
"""Models, and steps of a turn."""
BASE, SERVED = "dtf, one process", "dtf, async"
MODES = ("async", "sync")
APART = {"sync": 1e-4, "async": 0.05, "Paddle": 0.15}
"""How far a mean log loss may be from that of one process, relative. Only sync computes the same."""
ADAM = "lazy Adam for rows, its bias corrected by steps of the run"
PADDLE_ADAM = "Adam for rows when touched, its bias corrected by steps of the row"
TICKS = os.sysconf("SC_CLK_TCK")


class Group(Running):
    """Processes that divide the steps of a turn among those that are asked, on the clock of this process. `store`: the
    launcher's, kept while they run. `note`: what settings say of it, once it is ready.
    """

    note = ""

    def __init__(self, asked: Sequence[Process], beside: Sequence[Process] = (), store: TCPStore | None = None) -> None:
        super().__init__(asked, beside)
        self._store = store

    def turn(self, steps: int) -> Turn:
        self.prepare(
            [steps // len(self.asked) + (number < steps % len(self.asked)) for number in range(len(self.asked))]
        )
        before, began = self._processor_s(), time.perf_counter()
        losses = [answer["loss"] for answer in self._told(self._shares)]
        seconds = time.perf_counter() - began
        loss = None if None in losses else statistics.mean(losses)
        return Turn(seconds, self._processor_s() - before, loss, 0.0)

    def prepare(self, shares: Sequence[int]) -> None:
        self._shares = shares

    def _processor_s(self) -> float:
        return sum(processor_s(process.pid) for process in (*self.asked, *self.beside))


class PaddleGroup(Group):
    """They bring the batches of a turn into memory before it: dtf's are there."""

    def wait_until_ready(self) -> None:
        start_s = max(answer["start_s"] for answer in answers(self.asked, self.beside))
        self.note = f"; the start of train_from_dataset is {1e3 * start_s:.0f} ms of a turn"

    def prepare(self, shares: Sequence[int]) -> None:
        super().prepare(shares)
        self._told(shares)


@dataclass
class Server:
    """A contestant. `mode`: whose bound holds for its loss. `alone`: see `bench.contest.Starts`."""

    who: str
    about: str
    make: Callable[[], Group]
    mode: str = ""
    alone: bool = False
    group: Group | None = None

    def start(self) -> Running:
        self.group = self.make()
        return self.group

    @property
    def settings(self) -> str:
        return self.about + (self.group.note if self.group else "")


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has used; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


_PROCESS = [sys.executable, "-m", "bench.pserver_processes"]


def alone(log: Path, hidden: str, threads: int) -> Group:
    """dtf in one process."""
    return Group([Process([*_PROCESS, ALONE, str(log), hidden, "--threads", str(threads)])])


def servers(
    log: Path, hidden: str, mode: str, trainers: int, threads: int, server_threads: int, hogwild: int = 1
) -> Group:
    """One server of dtf, which is asked, and its trainers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    shared = [str(log), hidden, "--mode", mode, "--trainers", str(trainers), "--hogwild", str(hogwild)]
    shared += ["--store", f"127.0.0.1:{store.port}"]
    server = Process([*_PROCESS, SERVER, *shared, "--threads", str(server_threads)])
    commands = [
        [*_PROCESS, TRAINER, *shared, "--threads", str(threads), "--number", str(number)] for number in range(trainers)
    ]
    return Group([server], [Process(command) for command in commands], store)


def paddle(log: Path, hidden: str, trainers: int, threads: int) -> Group:
    """One server of Paddle, and its trainers, which are asked."""
    python = python_of("paddle")
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    rest = [str(log), "--hidden", *map(str, CASES[hidden][0]), "--threads", str(threads), "--port", str(port)]
    command = [python, "-m", "bench.pserver_paddle", *rest, "--trainers", str(trainers)]
    numbers = [["--number", str(number)] for number in range(trainers)]
    trained = [Process([*command, *number]) for number in numbers]
    return PaddleGroup(trained, [Process([*command, "--role", "server"])])


def contestants(log: Path, hidden: str, args: argparse.Namespace) -> list[Server]:
    count = cores()
    found = [Server(BASE, f"{_spread(1, count)}; {ADAM}", partial(alone, log, hidden, count))]
    for mode in args.modes:
        trainers, _ = host_layout(Mode(mode), count)
        threads, of = max(1, count // trainers), partial(servers, log, hidden, mode)
        start = partial(of, trainers, threads, max(1, count // (trainers + 1)))  # as launcher=local divides cores
        settings = f"strategy.trainers=auto, one server: {_spread(trainers, threads)}; {ADAM}"
        found.append(Server(f"dtf, {mode}", settings, start, mode))
        if mode == "async" and args.hogwild:
            settings = f"strategy.hogwild_threads={count}, one server: {_spread(1, count)}; {ADAM}"
            found.append(Server(f"dtf, {mode}, Hogwild", settings, partial(of, 1, count, 1, count), mode))
    many = min(count, MOST_TRAINERS, args.steps, args.warm)  # a trainer without a step in a turn would end
    for trainers, threads in sorted({(1, count), (many, count // many)}) if args.paddle else ():
        settings = f"a_sync, train_from_dataset, one server: {_spread(trainers, threads)}; {PADDLE_ADAM}"
        start = partial(paddle, log, hidden, trainers, threads)
        found.append(Server(f"Paddle 3.0.0, {trainers} x {threads}", settings, start, "Paddle", alone=True))
    return found


def _spread(trainers: int, threads: int) -> str:
    return f"{trainers} trainer{'s'[: trainers > 1]} of {threads} thread{'s'[: threads > 1]}"


def least_ratio(log: Path, hidden: str, step_s: float) -> float:
    """The rate of `sync` in terms of one process if nothing but its requests came on top of `step_s`."""
    service = Process([*_PROCESS, ECHO, str(log), hidden, "--threads", "1"])
    try:
        exchange_s = least_exchange_s(saved(log), hidden, answers([service])[0]["endpoint"])
    finally:
        service.end()
    return step_s / (step_s + exchange_s)


def compare(hidden: str, args: argparse.Namespace) -> list[Row]:
    """Of one model."""
    work = f"Servers on one host, perceptron {hidden}, batches of {args.batch:,}, turns of {args.steps} steps"
    with TemporaryDirectory(prefix="dtf-bench-pserver-") as folder:
        log = Path(folder)
        save(draw(args.ids, args.batch, args.warm + args.rounds * args.steps), log)
        those = contestants(log, hidden, args)
        turns, absent = contest(work, those, args.rounds, args.steps, args.warm)
        for mode, most in APART.items():
            absent += apart(work, turns, [those[0], *(one for one in those if one.mode == mode)], most)
        floor = ""
        if BASE in turns and "dtf, sync" in turns:
            step_s = statistics.median(turn.seconds for turn in turns[BASE]) / args.steps
            try:
                floor = f"; its requests alone would leave {least_ratio(log, hidden, step_s):.2f} of one process"
            except Absent as error:
                floor = f"; the time of its requests alone was not measured: {error}"
    rows = []
    for one in (one for one in those if one.who in turns):
        rates = [args.steps * args.batch / turn.seconds for turn in turns[one.who]]
        cpu = [1e3 * turn.cpu / args.steps for turn in turns[one.who]]
        settings = one.settings + floor * (one.mode == "sync")
        loss = turns[one.who][-1].loss
        rows.append(Row(work, one.who, "rows/s", rates, True, cpu, "ms a step", loss=loss, settings=settings))
    return with_ratios([*rows, *absent], SERVED)


def _measure(hidden: str, quick: bool) -> list[Row]:
    options = ["--rounds", "1", "--steps", "2", "--warm", "4", "--ids", "200000", "--batch", "256"]
    args = _parser().parse_args(options if quick else ["--rounds", "20"])
    return compare(hidden, with_steps(args, hidden))


def with_steps(args: argparse.Namespace, hidden: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "steps": args.steps or STEPS[hidden]})


def measure(quick: bool) -> list[Row]:
    """The small model: what servers themselves cost is most of it."""
    return _measure("64-32", quick)


def measure_400(quick: bool) -> list[Row]:
    """The large one, in which trainers compute more."""
    return _measure("400-400-400", quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--no-hogwild", dest="hogwild", action="store_false")
    parser.add_argument("--no-paddle", dest="paddle", action="store_false")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=0, help="of a turn; 0: as many as take half a second or so")
    parser.add_argument("--ids", type=int, default=1_000_000, help="distinct ids of all fields")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=40, help="steps before the first turn")
    parser.add_argument("--rows", action="store_true", help="measure the table of a server alone")
    parser.add_argument("--save", action="store_true", help="measure saving and loading alone")
    return parser


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; {args.ids:,} ids", flush=True)
    if args.rows or args.save:
        batches = args.rounds * (args.steps or 20)
        log = draw(args.ids, args.batch, batches)
        with TemporaryDirectory() as folder:
            rows_alone(log, batches // 2) if args.rows else save_and_load(log, Path(folder), args.rounds)
        return
    for hidden in [args.only] if args.only else STEPS:
        print(table(compare(hidden, with_steps(args, hidden))), flush=True)


if __name__ == "__main__":
    main()
