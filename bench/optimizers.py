"""What a step takes where a class of torch.optim is stepped by dtf: beside the class itself, and dtf's own kernels.

    python -m bench.optimizers                  # on the parameters of a small model and of a ResNet-18
    python -m bench.optimizers --only resnet18

The same gradients in each step; contestants take turns in one process. The loss shown is the sum of the parameters at
the end, which must be the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.rounds import alternating
from bench.rows import Row, table, with_ratios
from dtf.api.optimizer import Optimizer
from dtf.api.registry import lookup
from dtf.config.settings import load_parts
from dtf.optim.torch_class import torch_optimizer

LR = 1e-3
CLASSES = {"radam": "RAdam", "nadam": "NAdam", "rmsprop": "RMSprop", "class_adam": "Adam"}


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Those of the parameters of a model."""
    if name == "mlp":
        return [(64, 32), (64,), (64, 64), (64,), (10, 64), (10,)]
    from torchvision.models import resnet18

    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in resnet18().parameters()]


def draw(shapes: list[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def ours(optimizer: Optimizer, shapes: list[tuple[int, ...]]) -> tuple[Callable[[], None], list[Tensor]]:
    parameters = {str(number): tensor for number, tensor in enumerate(draw(shapes, 0))}
    bound, gradients = optimizer.bind(parameters), draw(shapes, 1)
    return lambda: bound.apply(gradients, LR, None), list(parameters.values())


def theirs(
    cls: type[torch.optim.Optimizer], shapes: list[tuple[int, ...]], **options: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    parameters = [torch.nn.Parameter(tensor) for tensor in draw(shapes, 0)]
    for parameter, gradient in zip(parameters, draw(shapes, 1), strict=True):
        parameter.grad = gradient
    instance = cls(parameters, lr=LR, **options)  # type: ignore[call-arg]
    return lambda: instance.step(), [parameter.detach() for parameter in parameters]


def contestants(name: str, shapes: list[tuple[int, ...]]) -> dict[str, tuple[Callable[[], None], list[Tensor]]]:
    """What steps, and the parameters that it steps."""
    cls = getattr(torch.optim, CLASSES[name])
    found = {
        "dtf": ours(lookup("optimizer", name)(), shapes),
        "torch": theirs(cls, shapes),
        "torch, foreach": theirs(cls, shapes, foreach=True),
    }
    if name == "class_adam":
        found["torch, fused"] = theirs(cls, shapes, fused=True)
        found["dtf's own adam"] = ours(lookup("optimizer", "adam")(), shapes)
    return found


def compare(model: str, rounds: int, steps: int) -> list[Row]:
    load_parts([])
    torch_optimizer("class_adam", "torch.optim:Adam")
    torch.set_num_threads(1)
    rows, shapes = [], shapes_of(model)
    for name in CLASSES:
        those = contestants(name, shapes)
        times: dict[str, list[float]] = {who: [] for who in those}
        for number, who in alternating(rounds + 1, those):
            step, _ = those[who]
            started = time.perf_counter()
            for _ in range(steps):
                step()
            if number:  # the first round begins states
                times[who].append((time.perf_counter() - started) / steps * 1e6)
        work = f"{CLASSES[name]}, parameters of {model}, one thread: mean of {steps} steps"
        for who, (_, parameters) in those.items():
            total = float(sum(parameter.double().sum() for parameter in parameters))
            rows.append(Row(work, who, "us a step", times[who], loss=total))
    return with_ratios(rows)


def measure(quick: bool, only: str = "") -> list[Row]:
    found = []
    for model, rounds, steps in (("mlp", 24, 200), ("resnet18", 12, 5)):
        if only in ("", model) and not (quick and model == "resnet18"):
            found += compare(model, 2 if quick else rounds, 20 if quick else steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["mlp", "resnet18"], default="")
    print(table(measure(False, parser.parse_args().only)))


if __name__ == "__main__":
    main()
