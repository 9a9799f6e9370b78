"""What more processes cost: processor time of a step, memory of a rank, and the start.

    python -m bench.growth [--quick]

1, 2, 4 and 8 ranks of the default recipe's network under ddp, of 128 rows a step in all, beside torchrun with the same
by hand: both read the rows from a file, and torchrun's ranks have the threads of dtf's and keep freed memory as these
do. 1, 2 and 4 parameter servers. The first step of 2, 8 and 32 ranks. Two cores: more ranks than these make a step no
faster. Processor time per step is that of all processes between two steps of a run, the launching one included. Memory
is what a rank has to itself and its part of what it shares (Pss), the largest of all ranks. A round is one run of each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.commands import DTF, dtf_run, memory_mb, script, started
from bench.plain_rows import from_file
from bench.rows import Row, table, with_ratios

FROM, UNTIL = 10, 40
RANKS, SERVERS, STARTS = (1, 2, 4, 8), (1, 2, 4), (2, 8, 32)


class Steady(NamedTuple):
    cpu_ms: float
    wall_ms: float
    memory_mb: float


def steady(command: list[str], folder: Path, until: int) -> Steady:
    """Of the steps between FROM and `until`."""
    with started(command, folder) as running:
        begun, cpu = 0.0, 0.0
        for seen in running.steps():
            if seen.step >= FROM and not begun:
                begun, cpu, first = seen.seconds, running.cpu_s(), seen.step
            if seen.step >= until - 1:
                steps = seen.step - first
                used, wall = running.cpu_s() - cpu, seen.seconds - begun
                return Steady(
                    used / steps * 1e3, wall / steps * 1e3, max(memory_mb(pid, "Pss") for pid in running.ranks())
                )
    raise RuntimeError(f"it ended before step {until}")


def first_step_s(command: list[str], folder: Path) -> float:
    with started(command, folder) as running:
        for seen in running.steps():
            return seen.seconds - running.began
    raise RuntimeError("it made no step")


def steady_rows(work: str, commands: dict[str, list[str]], rounds: int, until: int) -> list[Row]:
    """Three rows for each command: processor and wall time of a step, and memory."""
    found: dict[str, list[Steady]] = {who: [] for who in commands}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for who in list(commands)[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="dtf-bench-growth-", ignore_cleanup_errors=True) as name:
                try:
                    found[who].append(steady(commands[who], Path(name), until))
                except RuntimeError as error:
                    failed[who] = str(error)
    rows = []
    for who, some in found.items():
        if who in failed:
            rows.append(Row(work, who, not_run=failed[who]))
            continue
        wall, cpu, memory = ([getattr(one, key) for one in some] for key in ("wall_ms", "cpu_ms", "memory_mb"))
        rows.append(Row(work, who, "ms a step", wall, cpu=cpu, cpu_unit="ms"))
        rows.append(Row(f"{work}: memory of the largest rank", who, "MB", memory))
    return with_ratios(rows)


def measure(quick: bool) -> list[Row]:
    rounds, until = (1, 20) if quick else (3, UNTIL)
    found = []
    for count in RANKS[1:2] if quick else RANKS:
        own = dtf_run(count, until, *from_file(), "checkpoint=off")
        commands = {"dtf": own, "torchrun": script("torchrun", count, until)}
        found += steady_rows(f"{count} ranks, 128 rows a step in all", commands, rounds, until)
    for count in SERVERS[:1] if quick else SERVERS:
        command = [
            *DTF, "recipe=ctr_clicks_sparse", "strategy=pserver", f"strategy.servers={count}", "launcher.processes=2",
            f"train.until={until}", "train.log_every=1", "train.eval_every=0", "checkpoint=off", "observer=[console]",
        ]  # fmt: skip
        found += steady_rows(f"{count} parameter servers, 2 trainers", {"dtf": command}, rounds, until)
    return in_order(found)


def measure_starts(quick: bool) -> list[Row]:
    rounds, found = 1 if quick else 3, []
    for count in STARTS[:1] if quick else STARTS:
        with tempfile.TemporaryDirectory(prefix="dtf-bench-growth-", ignore_cleanup_errors=True) as name:
            work, values = f"from the command to the first step of {count} ranks", dict[str, list[float]]()
            commands = {"dtf": dtf_run(count, 1, "checkpoint=off"), "torchrun": script("torchrun", count, 1)}
            for number in range(rounds):
                for who in list(commands)[:: -1 if number % 2 else 1]:
                    values.setdefault(who, []).append(first_step_s(commands[who], Path(name)))
            found += with_ratios([Row(work, who, "s", some) for who, some in values.items()])
    return found


def in_order(rows: list[Row]) -> list[Row]:
    """Rows of the same work beside each other."""
    works = list(dict.fromkeys(row.work for row in rows))
    return sorted(rows, key=lambda row: works.index(row.work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a trial")
    quick = parser.parse_args().quick
    print(table([*measure(quick), *measure_starts(quick)]))


if __name__ == "__main__":
    main()
