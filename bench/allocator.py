"""What it is worth that ranks keep freed memory: steps of ResNet-18 at 224 pixels, 16 rows, channels last.

    python -m bench.allocator [--rounds 7]

Both ways in processes of their own, in turn: 5 steps after 2. Wall time and processor seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from bench.contest import ROOT
from bench.rows import Row, against_dtf, table

WAYS = ("given back to the system", "kept, as dtf does")
STEPS = 5


def work(way: str, pixels: int, rows: int) -> None:
    """One process."""
    if way == WAYS[1]:
        from dtf.host.allocator import keep_freed_memory

        keep_freed_memory()
    from torchvision.models import resnet18

    from bench.memory_format import stepper

    step = stepper(lambda: resnet18(num_classes=8), pixels, rows, "both")
    step()
    step()
    wall, cpu, loss = time.perf_counter(), time.process_time(), 0.0
    for _ in range(STEPS):
        loss = step()
    seconds = (time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([*seconds, usage.ru_maxrss / 1000, loss]))


def measure(quick: bool, rounds: int = 7) -> list[Row]:
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(1 if quick else rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            command = [sys.executable, "-m", "bench.allocator", "--work", way, *(["--quick"] if quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
            found[way].append(json.loads(done.stdout))
    works = ("ResNet-18, 224 pixels, 16 rows, channels last", "the most memory of the process")
    rows = []
    for way, runs in found.items():
        wall, cpu, memory, losses = ([run[index] for run in runs] for index in range(4))
        rows.append(Row(works[0], way, "s a step", wall, cpu=cpu, cpu_unit="s", loss=losses[-1]))
        rows.append(Row(works[1], way, "MB", memory))
    return sorted(against_dtf(rows, WAYS[1]), key=lambda row: works.index(row.work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, *((32, 2) if options.quick else (224, 16)))
        return
    print(table(measure(False, options.rounds)))


if __name__ == "__main__":
    main()
