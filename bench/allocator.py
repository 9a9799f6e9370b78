"""What it is worth that ranks keep freed memory, and have it in huge pages: steps of a network, forward, backward and
update, with no data to read.

    python -m bench.allocator [--rounds 6] [--case resnet18 | mlp | deepfm]

`resnet18`: ResNet-18 at 224 pixels, 16 rows, channels last. `mlp`: three small layers, 128 rows. `deepfm`: DeepFM with
the sizes of Criteo, 39 fields in a dense table of 1,000,000 rows, 4096 rows. The ways are processes of their own, in
turn, and in the other direction in each second round. Medians of wall time and of processor seconds of a step, of the
memory at the peak, of the time from the start of the allocations to the end of the first two steps, and of what the
kernel then says are huge pages; ratios to `kept` with their 95 % interval. It fails when the losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.medians import interval, machine
from bench.processes import PATIENCE_S
from bench.rounds import alternating
from bench.rows import Row, with_ratios

TORCH, GLIBC = "THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES"
WAYS = {
    "given back": {TORCH: "0"},
    "given back, huge pages": {TORCH: "1"},
    "kept": {TORCH: "0"},
    "kept, huge pages": {TORCH: "1"},
    "kept, glibc.malloc.hugetlb=1": {TORCH: "0", GLIBC: "glibc.malloc.hugetlb=1"},
}
"""Name -> environment variables."""
COLUMNS = ("wall", "processor", "memory")
STEPS = {"resnet18": 5, "mlp": 2000, "deepfm": 10}


def _resnet18() -> Callable[[], float]:
    from torchvision.models import resnet18

    from bench.memory_format import stepper

    return stepper(lambda: resnet18(num_classes=8), 224, 16, "both")


def _mlp() -> Callable[[], float]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs, targets = torch.randn(128, 32), torch.randint(10, (128,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> float:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _deepfm() -> Callable[[], float]:
    import torch
    from torch import nn

    from dtf.recipes.ctr.model import Inputs, Tower, WideDeep

    torch.manual_seed(0)
    model = WideDeep(Inputs(39, 0, 1_000_000), 16, Tower((400, 400, 400), False, 0.0), pairs=True)
    batches = [torch.randint(1_000_000, (4096, 39)) for _ in range(8)]
    targets = torch.randint(2, (4096,)).float()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    done = 0

    def step() -> float:
        nonlocal done
        logits = model({"ids": batches[done % len(batches)]})
        done += 1
        loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


CASES = {"resnet18": _resnet18, "mlp": _mlp, "deepfm": _deepfm}


def work(way: str, case: str) -> None:
    """One process. Prints seconds, processor seconds, MB at the peak, MB in huge pages, seconds to the second step,
    and the mean loss.
    """
    import torch  # noqa: F401 (not in the time to the second step)

    if way.startswith("kept"):
        from dtf.host.allocator import keep_freed_memory

        keep_freed_memory()
    began = time.perf_counter()
    step = CASES[case]()
    step()
    step()
    first = time.perf_counter() - began
    wall, cpu, steps = time.perf_counter(), time.process_time(), STEPS[case]
    loss = sum(step() for _ in range(steps)) / steps
    seconds = (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([*seconds, usage.ru_maxrss / 1000, huge_mb(), first, loss]))


def huge_mb() -> float:
    """What this process has in huge pages now, without files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) / 1000 for line in lines if line.startswith("AnonHugePages"))


def run(way: str, case: str) -> list[float]:
    """What `work` prints, from a process of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-m", "bench.allocator", "--case", case, "--work", way]
    given = own | WAYS[way]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, env=given, check=True, timeout=PATIENCE_S).stdout)


def compare(case: str, rounds: int) -> dict[str, list[list[float]]]:
    """Way -> what each round gave."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _, way in alternating(rounds, WAYS):
        found[way].append(run(way, case))
    return found


def show(case: str, found: dict[str, list[list[float]]]) -> None:
    for way, runs in found.items():
        wall, cpu, memory, huge, first, loss = (median(column) for column in zip(*runs, strict=True))
        print(
            f"{case}, {way}: {1e3 * wall:.4g} ms, processor {1e3 * cpu:.4g} ms, at most {memory:.0f} MB, huge pages "
            f"{huge:.0f} MB, first two steps {first:.2f} s, loss {loss:.6f}"
        )
    losses = [each[-1] for runs in found.values() for each in runs]
    if max(losses) - min(losses) > 1e-5 * abs(losses[0]):
        raise SystemExit(f"{case}: losses from {min(losses)} to {max(losses)}")
    for way in (way for way in found if way != "kept"):
        pairs = list(zip(found[way], found["kept"], strict=True))
        texts = [
            f"{name} {median(ratios):.3f} ({interval(ratios)})"
            for index, name in enumerate(COLUMNS)
            for ratios in [[one[index] / kept[index] for one, kept in pairs]]
        ]
        print(f"{case}, {way} / kept: {', '.join(texts)}", flush=True)


def measure(quick: bool) -> list[Row]:
    rows = []
    for case in ["mlp"] if quick else CASES:
        for way, runs in compare(case, 1 if quick else 6).items():
            wall, cpu, memory, _, _, loss = ([*column] for column in zip(*runs, strict=True))
            settings = f"{median(memory):.0f} MB"
            times, used = ([1e3 * each for each in column] for column in (wall, cpu))
            rows.append(
                Row(
                    f"Memory of ranks, {case}, turns of {STEPS[case]} steps",
                    way,
                    "ms a step",
                    times,
                    False,
                    used,
                    "ms",
                    loss=loss[-1],
                    settings=settings,
                )
            )
    return with_ratios(rows, "kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.case)
        return
    print(machine())
    for case in [options.case] if options.case else CASES:
        show(case, compare(case, options.rounds))


if __name__ == "__main__":
    main()
