"""A sparse table ten times larger than its memory: steps a second beside what this disk could do, dtf's table in
memory, rocksdict and a memory-mapped file.

    python -m bench.table_tiers --exponent 1.2

Ids are drawn by popularity (rank ** -exponent) in 26 fields. Each contestant is a process; all build the same table,
do the same steps and take turns. They must see the same rows, bit for bit. A cgroup bounds the memory of each, where
one can be made: what it had before it made its table, the bound, and some megabytes for buffers. The disk is read
past the page cache where the file system allows it. `the floor` is the time in which this disk reads the pages that
dtf's misses need, at random, with as many reads at a time, right after each turn of dtf, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers import Absent, python_of
from bench.processes import Process, answers
from bench.rows import Row, table, with_ratios
from bench.table_tiers_sides import SIDES, WIDTH

_CGROUPS = Path("/sys/fs/cgroup/memory")
_LESS = 10
"""A table is so many times larger than its memory."""


class Child:
    """A contestant and the cgroup it is in, if there is one."""

    def __init__(self, who: str, folder: Path, rows: int, exponent: float, batch: int, steps: int) -> None:
        self.who, self.turns = who, list[dict[str, Any]]()
        home = folder / who.replace(" ", "-")
        home.mkdir()
        self.cgroup = _CGROUPS / f"dtf-bench-{os.getpid()}-{home.name}"
        with suppress(OSError):
            self.cgroup.mkdir()
        if not (self.cgroup / "memory.limit_in_bytes").exists():
            self.cgroup = Path()
        memory = rows * 4 * (WIDTH + 1) // _LESS
        python = python_of("rocksdict") if who == "rocksdict" else sys.executable
        group = str(self.cgroup) if self.cgroup.name else ""
        words = [who, str(home), group, *map(str, (rows, exponent, batch, steps, memory))]
        self._process = Process([python, "-m", "bench.table_tiers_sides", *words])
        self.facts = answers([self._process])[0]

    def turn(self, steps: int) -> dict[str, Any]:
        self._process.send(steps)
        return answers([self._process])[0]

    def end(self) -> None:
        self._process.end()
        if self.cgroup.name:
            with suppress(OSError):
                self.cgroup.rmdir()


def measure(quick: bool, exponent: float | None = None, rows: int = 6_000_000, rounds: int = 5) -> list[Row]:
    batch, steps, warm = 512, 8, 30
    if quick:
        rows, batch, rounds, steps, warm = 260_000, 128, 1, 4, 40
    found = []
    for each in (1.05, 1.2) if exponent is None else (exponent,):
        found += _measure(each, rows, batch, rounds, steps, warm)
    return found


def _measure(exponent: float, rows: int, batch: int, rounds: int, steps: int, warm: int) -> list[Row]:
    work = f"a table of {rows:,} rows in a tenth of its memory, popularity rank ** -{exponent}"
    folder = Path(tempfile.mkdtemp(prefix="dtf-tiers-", dir=os.environ.get("DTF_BENCH_DISK")))
    children: list[Child] = []
    absent, began = [], time.monotonic()
    try:
        for who in SIDES:
            print(f"  {who} starts ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
            try:
                children.append(Child(who, folder, rows, exponent, batch, warm + rounds * steps))
            except Absent as error:
                absent.append(Row(work, who, not_run=str(error)))
        for child in list(children):
            try:
                child.turn(warm)
            except Absent as error:
                absent.append(Row(work, child.who, not_run=str(error)))
                children.remove(child)
                child.end()
        for number in range(rounds):
            for child in list(children if number % 2 else children[::-1]):
                try:
                    child.turns.append(child.turn(steps))
                except Absent as error:
                    absent.append(Row(work, child.who, not_run=f"in round {number + 1}: {error}"))
                    children.remove(child)
                    child.end()
    finally:
        for child in children:
            child.end()
        shutil.rmtree(folder, ignore_errors=True)
    for digests in zip(*[[turn["digest"] for turn in child.turns] for child in children], strict=True):
        if len(set(digests)) > 1:
            raise SystemExit(f"all must see the same rows; their digests are {dict(zip(SIDES, digests, strict=False))}")
    return [*with_ratios(_rows(work, children, steps, batch)), *absent]


def _rows(work: str, children: list[Child], steps: int, batch: int) -> list[Row]:
    found = []
    for child in children:
        limit = child.facts["limit_mb"]
        bound = f"memory bounded by a cgroup, {limit:.0f} MB, {child.facts['over_mb']:.0f} over the bound"
        grown = f"takes {max(turn['grown_mb'] for turn in child.turns):.0f} MB"
        own = "memory not bounded" if child.who == "in memory" else "memory bounded by its own options"
        settings = bound if limit else f"{own}, {grown}"
        cpu = [1e3 * turn["cpu"] / steps for turn in child.turns]
        if child.who == "dtf":
            hits = median(turn["hits"] for turn in child.turns)
            pages = median(turn["pages"] / steps for turn in child.turns)
            swept = median(turn["swept_mb"] / steps for turn in child.turns)
            settings += (
                f"; {100 * hits:.1f} % of rows in memory, {pages:,.0f} pages read and {swept:.1f} MB swept a step"
            )
            floor = [steps / turn["floor_s"] for turn in child.turns if turn["floor_s"]]
            if len(floor) == len(child.turns):
                found.append(
                    Row(work, "the floor", "steps/s", floor, True, settings="random reads of these pages alone")
                )
        rates = [steps / turn["seconds"] for turn in child.turns]
        found.append(Row(work, child.who, "steps/s", rates, True, cpu=cpu, cpu_unit="ms", settings=settings))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exponent", type=float, help="by default 1.05 and 1.2")
    parser.add_argument("--rows", type=int, default=6_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(table(measure(False, given.exponent, given.rows, given.rounds)))


if __name__ == "__main__":
    main()
