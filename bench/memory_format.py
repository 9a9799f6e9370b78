"""What channels last in memory are worth: steps of networks of convolutions, forward, backward and update.

    python -m bench.memory_format [--rounds 20] [--threads 2]

`input`: images alone have their channels last; `both`: the weights of convolutions too, as under step.memory_format.
The ways take turns in one process.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from bench.rounds import alternating
from bench.rows import Row, table, with_ratios

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

WAYS = ("first", "input", "both")
TITLES = {"first": "channels first", "input": "images channels last", "both": "images and weights, as dtf"}


def networks() -> dict[str, tuple[Callable[[], nn.Module], int, int]]:
    """Name -> how it is made, pixels of an image each way, and rows of a step."""
    from torchvision.models import mobilenet_v2, resnet18, resnet50

    from dtf.recipes.resnet.recipe import ResnetShapes

    return {
        "recipe=resnet_shapes": (ResnetShapes().build_model, 24, 128),
        "ResNet-18": (lambda: resnet18(num_classes=8), 32, 64),
        "ResNet-18 ": (lambda: resnet18(num_classes=8), 64, 32),
        "ResNet-18  ": (lambda: resnet18(num_classes=8), 224, 8),
        "ResNet-50": (lambda: resnet50(num_classes=8), 224, 4),
        "MobileNetV2": (lambda: mobilenet_v2(num_classes=8), 64, 32),
        "MobileNetV2 ": (lambda: mobilenet_v2(num_classes=8), 224, 8),
    }


def stepper(make: Callable[[], nn.Module], pixels: int, rows: int, way: str) -> Callable[[], float]:
    """A function that makes a step and returns the loss."""
    import torch

    from dtf.model.memory_format import channels_last, weights_channels_last

    torch.manual_seed(0)
    model, inputs, targets = make(), torch.randn(rows, 3, pixels, pixels), torch.randint(8, (rows,))
    if way == "both":
        weights_channels_last(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)

    def step() -> float:
        torch.manual_seed(0)  # the ways take turns, and dropout draws from one generator
        images = inputs if way == "first" else channels_last(inputs)
        loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measure(quick: bool, rounds: int = 20, threads: int = 2) -> list[Row]:
    import torch

    before, found = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    for name, (make, pixels, rows) in list(networks().items())[: 1 if quick else None]:
        steps = {way: stepper(make, pixels, 2 if quick else rows, way) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        cpu: dict[str, list[float]] = {way: [] for way in WAYS}
        losses: dict[str, float] = {}
        for _, way in alternating((1 if quick else rounds) + 2, WAYS):
            began, used = time.perf_counter(), time.process_time()
            loss = steps[way]()
            times[way].append((time.perf_counter() - began) * 1e3)
            cpu[way].append((time.process_time() - used) * 1e3)
            losses.setdefault(way, loss)  # of the first step, from equal weights: later ones amplify rounding
        work = f"{name.strip()}, {pixels} pixels, {rows} rows, turns of a step"
        found += with_ratios(
            [
                Row(work, TITLES[way], "ms a step", times[way][2:], cpu=cpu[way][2:], cpu_unit="ms", loss=losses[way])
                for way in WAYS
            ],
            TITLES["both"],
        )
    torch.set_num_threads(before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(table(measure(False, options.rounds, options.threads)))


if __name__ == "__main__":
    main()
