"""What it is worth that ranks keep freed memory: steps of ResNet-18 at 224 pixels, 16 rows, channels last.

    python -m bench.allocator [--rounds 5]

Both ways in processes of their own, in turn: 5 steps after 2. Medians of wall time and of processor seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

from bench.medians import interval, machine

WAYS = ("given back", "kept")
STEPS = 5


def work(way: str) -> None:
    """One process."""
    if way == "kept":
        from dtf.host.allocator import keep_freed_memory

        keep_freed_memory()
    from torchvision.models import resnet18

    from bench.memory_format import stepper

    step = stepper(lambda: resnet18(num_classes=8), 224, 16, "both")
    step()
    step()
    wall, cpu, loss = time.perf_counter(), time.process_time(), 0.0
    for _ in range(STEPS):
        loss = step()
    seconds = (time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([*seconds, usage.ru_maxrss / 1000, loss]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    print(machine())
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            command = [sys.executable, "-m", "bench.allocator", "--work", way]
            found[way].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    for way, runs in found.items():
        wall, cpu, memory, loss = (median(column) for column in zip(*runs, strict=True))
        print(f"{way}: {wall:.3f} s, processor {cpu:.3f} s, at most {memory:.0f} MB, loss {loss:.6f}")
    for index, name in enumerate(("wall", "processor")):
        ratios = [kept[index] / back[index] for back, kept in zip(*found.values(), strict=True)]
        print(f"kept / given back, {name}: {median(ratios):.2f} ({interval(ratios)})")


if __name__ == "__main__":
    main()
