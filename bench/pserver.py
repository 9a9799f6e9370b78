"""How fast parameter servers train a click-through model on one host, against dtf in one process and Paddle's
parameter server, on the same rows in memory.

    python -m bench.pserver                          # both models of bench/ctr.py in fp32
    python -m bench.pserver --only 64-32 --no-paddle
    python -m bench.pserver --rows                   # rows that one thread of a server steps and looks up in a second
    python -m bench.pserver --save --ids 260000      # how long a server takes to save and load so many rows

`auto` is the layout of strategy.trainers=auto for this host. Servers and trainers are processes that talk as with
launcher=local; the server runs the engine. Paddle has an environment of its own in the user's cache directory, made
where it is not there.

Contestants take short turns, in each round in the other direction; all tables of dtf hold all rows before anything is
timed. A turn ends when its last gradients are applied. What they lose on rows that they had not seen before is compared
at the end: sync must be the same as one process, async near it. Printed are medians, of the ratios of each
round with their 95 % interval, and the seconds of the processor that all processes of a contestant took for a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.distributed import TCPStore

from bench.ctr import CASES
from bench.ctr_rivals import draw
from bench.medians import interval, machine
from bench.peers import Absent, python_of
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
from bench.rows import Row, with_ratios
from dtf.host.devices import cores
from dtf.host.network import listen
from dtf.pserver.host_layout import host_layout
from dtf.pserver.options import Mode

MODELS = ("400-400-400", "64-32")
BASE = "one process"
APART = {"sync": 1e-4, "async": 0.05}
"""How far a mean log loss may be from that of one process. Trainers of async see older parameters, so that their loss
falls later.
"""
TICKS = os.sysconf("SC_CLK_TCK")


class Turn(NamedTuple):
    seconds: float
    loss: float | None
    processor_s: float


class Contestant:
    """Processes of which the first one takes lines and answers them. `mode`: with whose losses they are compared."""

    def __init__(self, mode: str = "") -> None:
        self.mode, self._processes = mode, list[subprocess.Popen[str]]()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  `close` does

    def start(self, command: Sequence[str], asked: bool) -> None:
        """Start one of the processes. `asked`: it is the one that takes lines."""
        pipe = subprocess.PIPE if asked else subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        self._processes.insert(0 if asked else len(self._processes), process)

    def send(self, line: str) -> dict[str, float | None]:
        """The answer to a line. Absent where there is none."""
        process = self._processes[0]
        assert process.stdin is not None and process.stdout is not None
        try:
            print(line, file=process.stdin, flush=True)
        except BrokenPipeError:
            raise self._absent() from None
        answer = process.stdout.readline()
        if not answer:
            raise self._absent()
        return json.loads(answer)

    def _absent(self) -> Absent:
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        words = [line for line in said if "Error" in line] or said or ["it said nothing"]
        return Absent(f"its process ended: {words[-1]}")

    def turn(self, steps: int) -> Turn:
        before = self._processor_s()
        answer = self.send(str(steps))
        assert answer["seconds"] is not None
        return Turn(answer["seconds"], answer["loss"], self._processor_s() - before)

    def _processor_s(self) -> float:
        return sum(processor_s(process.pid) for process in self._processes)

    def close(self) -> None:
        """End the first process, which ends the others; those that do not end are killed."""
        self._errors.close()
        first, *others = self._processes
        assert first.stdin is not None
        with suppress(BrokenPipeError):
            first.stdin.close()
        for process in (first, *others):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has used; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


class Alone(Contestant):
    """dtf in one process."""

    def __init__(self, log: Path, hidden: str, threads: int) -> None:
        super().__init__()
        self.start([*_PROCESS, ALONE, str(log), hidden, "--threads", str(threads)], True)


class Servers(Contestant):
    """One server of dtf and its trainers."""

    def __init__(
        self, log: Path, hidden: str, mode: str, trainers: int, threads: int, server_threads: int, hogwild: int = 1
    ) -> None:
        super().__init__(mode)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
        shared = ["--mode", mode, "--trainers", str(trainers), "--hogwild", str(hogwild)]
        shared += ["--store", f"127.0.0.1:{self._store.port}"]
        place = [str(log), hidden, *shared]
        self.start([*_PROCESS, SERVER, *place, "--threads", str(server_threads)], True)
        for number in range(trainers):
            self.start([*_PROCESS, TRAINER, *place, "--threads", str(threads), "--number", str(number)], False)


def least_ratio(log: Path, hidden: str, step_s: float) -> float:
    """The rate of `sync` in terms of one process if nothing but its requests came on top of `step_s`."""
    with subprocess.Popen(
        [*_PROCESS, ECHO, str(log), hidden, "--threads", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdin is not None and service.stdout is not None
        exchange_s = least_exchange_s(saved(log), hidden, service.stdout.readline().strip())
        service.stdin.close()
    return step_s / (step_s + exchange_s)


class Paddle(Contestant):
    """One server of Paddle and one trainer, whose threads are one for each core."""

    def __init__(self, python: Path, log: Path, hidden: str, way: str, threads: int) -> None:
        super().__init__()
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        script = str(Path(__file__).with_name("pserver_paddle.py"))
        for role in ("server", "trainer"):
            units = [str(number) for number in CASES[hidden][0]]
            rest = [str(log), way, "--hidden", *units, "--threads", str(threads), "--port", str(port)]
            self.start([str(python), script, role, *rest], role == "trainer")


_PROCESS = [sys.executable, "-m", "bench.pserver_processes"]


def laid_out(mode: str) -> tuple[str, int, int, int]:
    """What launcher=local starts with strategy.trainers=auto and one server: its name, how many trainers, threads of
    each, threads of the server.
    """
    trainers, _ = host_layout(Mode(mode), cores())
    threads = max(1, cores() // trainers)
    return f"{mode}, auto: {trainers} x {threads}", trainers, threads, max(1, cores() // (trainers + 1))


def contestants(log: Path, hidden: str, args: argparse.Namespace, close: ExitStack) -> dict[str, Contestant | Absent]:
    """All of them by name, or why one cannot be run; `close` ends them."""
    count, found = cores(), dict[str, Contestant | Absent]()

    def add(name: str, contestant: Contestant) -> None:
        found[name] = contestant
        close.callback(contestant.close)

    add(BASE, Alone(log, hidden, count))
    for mode in args.modes:
        name, trainers, threads, server_threads = laid_out(mode)
        add(name, Servers(log, hidden, mode, trainers, threads, server_threads))
        if mode == "async" and args.hogwild:
            add(f"{mode}, Hogwild: {count} threads", Servers(log, hidden, mode, 1, count, 1, count))
    for way in ("feed", "dataset") if args.paddle else ():
        name = f"Paddle 3.0.0, {way}"
        try:
            add(name, Paddle(Path(python_of("paddle")), log, hidden, way, count))
        except Absent as error:
            found[name] = error
    return found


class Compared(NamedTuple):
    """Of one model. `floor`: see `least_ratio`; None without `sync`."""

    turns: dict[str, list[Turn]]
    absent: dict[str, str]
    floor: float | None


def compare(hidden: str, log: Path, args: argparse.Namespace) -> Compared:
    """SystemExit where the losses differ that must not."""
    floor = None
    with ExitStack() as close:
        found = contestants(log, hidden, args, close)
        for name, contestant in found.items():
            try:
                if isinstance(contestant, Contestant):
                    contestant.turn(args.warm)
            except Absent as error:
                found[name] = error
        runs = {name: contestant for name, contestant in found.items() if isinstance(contestant, Contestant)}
        turns_of: dict[str, list[Turn]] = {name: [] for name in runs}
        for number in range(args.rounds):
            for name in list(runs) if number % 2 else reversed(runs):
                time.sleep(0.1)  # threads of the one before may still spin
                turns_of[name].append(runs[name].turn(args.steps))
        absent = {name: str(error) for name, error in found.items() if isinstance(error, Absent)}
        if any(run.mode == "sync" for run in runs.values()):
            step_s = statistics.median(turn.seconds for turn in turns_of[BASE]) / args.steps
            floor = least_ratio(log, hidden, step_s)
        check_losses(hidden, {name: run.mode for name, run in runs.items()}, turns_of)
    return Compared(turns_of, absent, floor)


def measure(quick: bool) -> list[Row]:
    """Both models; of short turns, so that all see the same machine."""
    found: list[Row] = []
    for hidden, steps in (("400-400-400", 12), ("64-32", 40)):
        options = ["--rounds", "1", "--steps", "2", "--warm", "4", "--ids", "10000", "--batch", "256"]
        args = _parser().parse_args(options if quick else ["--rounds", "20", "--steps", str(steps)])
        with TemporaryDirectory() as name:
            folder = Path(name)
            save(draw(args.ids, args.batch, args.warm + args.rounds * args.steps), folder)
            compared = compare(hidden, folder, args)
        work = f"Servers on one host, multilayer perceptron {hidden}"
        for who, turns in compared.turns.items():
            rates = [args.steps * args.batch / turn.seconds for turn in turns]
            cpu = [1e3 * turn.processor_s / args.steps for turn in turns]
            dtf = who if who == BASE or who.startswith("Paddle") else f"dtf, {who}"
            settings = f"its requests alone would leave {compared.floor:.2f}" if who.startswith("sync") else ""
            found.append(
                Row(work, dtf, "rows/s", rates, True, cpu, "ms a step", loss=turns[-1].loss, settings=settings)
            )
        found += [Row(work, who, not_run=why) for who, why in compared.absent.items()]
    return with_ratios(found, f"dtf, {laid_out('async')[0]}")


def check_losses(hidden: str, modes: dict[str, str], turns_of: dict[str, list[Turn]]) -> None:
    base = turns_of[BASE][-1].loss
    for name, turns in turns_of.items():
        mode, loss = modes[name], turns[-1].loss
        if mode in APART and (loss is None or base is None or abs(loss - base) > APART[mode]):
            raise SystemExit(
                f"{hidden}: the losses of {name} must be those of one process within {APART[mode]:g}; they are {loss} "
                f"and {base}"
            )


def print_table(hidden: str, turns_of: dict[str, list[Turn]], absent: dict[str, str], steps: int, batch: int) -> None:
    """Medians, ratios to one process and to the faster way of Paddle, and the losses of the last turn."""
    rates = {
        name: statistics.median(steps * batch / turn.seconds for turn in turns) for name, turns in turns_of.items()
    }
    paddle = max((name for name in rates if name.startswith("Paddle")), key=rates.__getitem__, default=None)
    print(
        f"\n{hidden:28}{'rows/s':>9} {'of one process':>16} {'95 % of medians':>16} {'of Paddle':>10} "
        f"{'95 %':>14} {'processor ms':>13} {'loss':>9}"
    )
    for name, turns in turns_of.items():
        columns = f"{name:28}{rates[name]:9,.0f}"
        for base, width in ((BASE, 16), (paddle, 14)):
            if base is None:
                columns += f" {'':>10} {'':>{width}}"
                continue
            ratios = [b.seconds / turn.seconds for b, turn in zip(turns_of[base], turns, strict=True)]
            columns += f" {statistics.median(ratios):>{16 if base == BASE else 10}.3f} {interval(ratios):>{width}}"
        processor = 1e3 * statistics.median(turn.processor_s for turn in turns) / steps
        loss = turns[-1].loss
        print(f"{columns} {processor:13.2f} {'unknown' if loss is None else f'{loss:.6f}':>9}")
    for name, why in absent.items():
        print(f"{name:28}not run: {why}")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--modes", nargs="+", choices=list(APART), default=["async", "sync"])
    parser.add_argument("--no-hogwild", dest="hogwild", action="store_false")
    parser.add_argument("--no-paddle", dest="paddle", action="store_false")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--ids", type=int, default=1_000_000, help="distinct ids of all fields")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=40, help="steps before the first turn")
    parser.add_argument("--rows", action="store_true", help="measure the table of a server alone")
    parser.add_argument("--save", action="store_true", help="measure saving and loading alone")
    return parser


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; {args.ids:,} ids, batches of {args.batch}, turns of {args.steps} steps", flush=True)
    with TemporaryDirectory() as name:
        folder, log = Path(name), draw(args.ids, args.batch, args.warm + args.rounds * args.steps)
        if args.rows:
            rows_alone(log, args.rounds * args.steps // 2)
            return
        if args.save:
            save_and_load(log, folder, args.rounds)
            return
        save(log, folder)
        del log
        for hidden in [args.only] if args.only else MODELS:
            turns_of, absent, floor = compare(hidden, folder, args)
            print_table(hidden, turns_of, absent, args.steps, args.batch)
            if floor is not None:
                print(f"sync, if only its bytes and a round trip came on top: {floor:.3f}")


if __name__ == "__main__":
    main()
