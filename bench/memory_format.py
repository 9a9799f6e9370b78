"""What channels last in memory are worth: steps of networks of convolutions, forward, backward and update.

    python -m bench.memory_format [--rounds 20] [--threads 2]

`input`: images alone have their channels last; `both`: the weights of convolutions too, as under step.memory_format.
The ways take turns in one process; medians of the times, and of the ratios to channels first with their 95 % interval.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import TYPE_CHECKING

from bench.medians import interval, machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

WAYS = ("first", "input", "both")


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
        images = inputs if way == "first" else channels_last(inputs)
        loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{machine()}, {options.threads} threads")
    for name, (make, pixels, rows) in networks().items():
        steps = {way: stepper(make, pixels, rows, way) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        losses: dict[str, float] = {}
        for number in range(options.rounds + 2):
            for way in WAYS[:: -1 if number % 2 else 1]:
                began = time.perf_counter()
                losses[way] = steps[way]()
                times[way].append(time.perf_counter() - began)
        text = f"{name.strip()}, {pixels} px, {rows} rows: {1e3 * median(times['first'][2:]):.0f} ms"
        for way in WAYS[1:]:
            ratios = [one / first for one, first in zip(times[way][2:], times["first"][2:], strict=True)]
            apart = abs(losses[way] - losses["first"]) / abs(losses["first"])
            text += f"; {way} {median(ratios):.2f} ({interval(ratios)}), loss {apart:.0e} apart"
        print(text, flush=True)


if __name__ == "__main__":
    main()
