"""What step.compile is worth: steps of ResNet-18 and DeepFM, forward, backward and update, and how long it takes to
compile them, at the first start and at the second, which finds the machine code of the first.

    python -m bench.compiled [--case resnet|resnet-last|deepfm] [--rounds 12] [--threads 2]

The ways take turns in one process. Each start is a process of its own; its time is that of the first step less that of
a later one. The caches are in a new folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.medians import machine
from bench.processes import PATIENCE_S
from bench.rounds import alternating
from bench.rows import Row, table, with_ratios

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

WAYS = ("off", "blocks", "model")
CASES = {
    "resnet": "ResNet-18, 224 px, 8 rows",
    "resnet-last": "ResNet-18, 224 px, 8 rows, channels last",
    "deepfm": "DeepFM, 39 fields of 10, layers of 400, 2048 rows",
}
FIELDS, IDS, DIM, DROPOUT = 39, 100_000, 10, 0.2


def model_of(case: str) -> nn.Module:
    if case == "deepfm":
        from dtf.recipes.ctr.model import Inputs, Tower, WideDeep, draw

        model = WideDeep(Inputs(FIELDS, 0, IDS), DIM, Tower((400, 400, 400), True, DROPOUT), pairs=True)
        draw(model, 0.01)
        return model
    from torchvision.models import resnet18

    return resnet18(num_classes=8)


def batch_of(case: str) -> tuple[Any, Tensor]:
    import torch

    from dtf.model.memory_format import channels_last

    if case == "deepfm":
        return {"ids": torch.randint(IDS, (2048, FIELDS))}, torch.randint(2, (2048,)).float()
    images = torch.randn(8, 3, 224, 224)
    return channels_last(images) if case == "resnet-last" else images, torch.randint(8, (8,))


def stepper(case: str, way: str) -> Callable[[int], float]:
    """A function that makes a step, as dtf does, and returns the loss."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

    from dtf.api.options import Compile
    from dtf.model.batch_statistics import BatchNormStatistics
    from dtf.model.compiled_forward import compile_modules
    from dtf.model.compiled_parts import parts_to_compile
    from dtf.model.memory_format import weights_channels_last
    from dtf.model.seeded_dropout import SeededDropout
    from dtf.recipes.resnet.recipe import ResnetShapes

    torch.manual_seed(0)
    model, (inputs, targets) = model_of(case), batch_of(case)
    if case == "resnet-last":
        weights_channels_last(model)
    BatchNormStatistics(model)
    masks = SeededDropout(model, 0, torch.device("cpu"))
    compile_modules(model, parts_to_compile(Compile(way), ResnetShapes(), model), f"step.compile={way}")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    loss_of = binary_cross_entropy_with_logits if case == "deepfm" else cross_entropy

    def step(number: int) -> float:
        masks.begin_micro_batch(number, 0)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def started(case: str, way: str) -> float:
    """Seconds that compiling adds to the first step in this process."""
    step, times = stepper(case, way), []
    for number in range(4):
        began = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - began)
    return times[0] - median(times[1:])


def starts(case: str, way: str, threads: int) -> tuple[float, float]:
    """Seconds of the first start and of the second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.compiled", "--case", case, "--start", way, "--threads", str(threads)]
        environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
        environment |= {"XDG_CACHE_HOME": folder}

        def seconds() -> float:
            pipe = subprocess.PIPE
            done = subprocess.run(command, env=environment, check=True, stdout=pipe, timeout=PATIENCE_S)
            return float(done.stdout.split()[-1])

        return seconds(), seconds()


def compare(case: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each way's steps, in turns, and the loss of its first one: later ones amplify rounding."""
    steps = {way: stepper(case, way) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}
    for number, way in alternating(rounds + 2, WAYS):
        began = time.perf_counter()
        loss = steps[way](number)
        times[way].append(time.perf_counter() - began)
        losses.setdefault(way, loss)
    return {way: found[2:] for way, found in times.items()}, losses


def rows_of(case: str, rounds: int) -> list[Row]:
    """The times of steps, and the ratios to `off`."""
    times, losses = compare(case, rounds)
    ways = {way: [1e3 * time for time in some] for way, some in times.items()}
    work = f"step.compile, {CASES[case]}, turns of a step"
    rows = [Row(work, f"step.compile={way}", "ms a step", some, loss=losses[way]) for way, some in ways.items()]
    return with_ratios(rows, "step.compile=off")


def measure(quick: bool) -> list[Row]:
    cases = ["deepfm"] if quick else list(CASES)
    return [row for case in cases for row in rows_of(case, 1 if quick else 20)]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=12, help="0: starts alone")
    parser.add_argument("--starts", choices=("yes", "no"), default="yes")
    parser.add_argument("--start", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.start:
        print(started(options.case, options.start))
        return
    print(f"{machine()}, {options.threads} threads")
    for case in [options.case] if options.case else CASES:
        if options.rounds:
            print(f"\n{table(rows_of(case, options.rounds))}\n", flush=True)
        for way in WAYS[1:] if options.starts == "yes" else ():
            first, second = starts(case, way, options.threads)
            print(f"  {way} compiles in {first:.1f} s, at the second start in {second:.1f} s", flush=True)


if __name__ == "__main__":
    main()
