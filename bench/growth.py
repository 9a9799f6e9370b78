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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.commands import DTF, dtf_run, memory_mb, script, started
from bench.first_step import seconds_to_first_step
from bench.plain_rows import from_file
from bench.rounds import in_turn
from bench.rows import Row, table, with_ratios

FROM, UNTIL = 10, 40
RANKS, SERVERS, STARTS = (1, 2, 4, 8), (1, 2, 4), (2, 8, 32)


class Steady(NamedTuple):
    cpu_ms: float
    wall_ms: float
    memory_mb: float


def steady(command: list[str], until: int) -> Steady:
    """Of the steps between FROM and `until`."""
    folder = TemporaryDirectory(prefix="dtf-bench-growth-", ignore_cleanup_errors=True)
    with folder as name, started(command, Path(name)) as running:
        steps = running.steps()
        first = next(seen for seen in steps if seen.step >= FROM)
        before = running.cpu_s()
        last = next(seen for seen in steps if seen.step >= until - 1)
        cpu, memory = running.cpu_s() - before, max(memory_mb(pid, "Pss") for pid in running.ranks())
        count = last.step - first.step
        return Steady(cpu / count * 1e3, (last.seconds - first.seconds) / count * 1e3, memory)


def steady_rows(work: str, commands: dict[str, list[str]], rounds: int, until: int) -> list[Row]:
    """Two rows for each command: time of a step, and memory."""
    found, failed = in_turn(rounds, commands, partial(steady, until=until))
    rows = [Row(work, who, not_run=why) for who, why in failed.items()]
    for who, some in found.items():
        wall, cpu, memory = ([getattr(one, key) for one in some] for key in ("wall_ms", "cpu_ms", "memory_mb"))
        settings = f"mean of the steps {FROM} to {until - 1}"
        rows.append(Row(work, who, "ms a step", wall, cpu=cpu, cpu_unit="ms", settings=settings))
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
        work = f"from the command to the first step of {count} ranks"
        commands = {"dtf": dtf_run(count, 1, "checkpoint=off"), "torchrun": script("torchrun", count, 1)}
        with TemporaryDirectory(prefix="dtf-bench-growth-", ignore_cleanup_errors=True) as name:
            times, failed = in_turn(rounds, commands, partial(seconds_to_first_step, folder=Path(name)))
        found += with_ratios([Row(work, who, "s", [wall for wall, _ in some]) for who, some in times.items()])
        found += [Row(work, who, not_run=why) for who, why in failed.items()]
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
