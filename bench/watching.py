"""What it costs in each step to watch the buffers of a model, and frozen parameters.

    python -m bench.watching

For each model the microseconds of a mark before the passes and a check after them, 50 means of 100, beside a forward
and backward pass over one row. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from bench.rows import Row, table
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.changing_buffers import ChangingBuffers


class Plain(nn.Module):
    """Layers with a buffer each that passes read."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))
        for layer in self.layers:
            layer.register_buffer("shift", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + layer.get_buffer("shift")
        return x


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Name -> (model, shape of a row)."""
    from torchvision import models as vision

    frozen = vision.resnet50()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad = name.startswith("fc")
    return {
        "ResNet-50": (vision.resnet50(), (3, 64, 64)),
        "ResNet-50, all but the head frozen": (frozen, (3, 64, 64)),
        "Swin-T": (vision.swin_t(), (3, 64, 64)),
        "MLP with 100 buffers": (Plain(100), (64,)),
    }


def means_us(call: Callable[[], None], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(100):
            call()
        found.append((time.perf_counter() - began) * 1e4)
    return found


def measure(quick: bool) -> list[Row]:
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for name, (model, shape) in list(models().items())[-1 if quick else 0 :]:
        averages = BatchNormStatistics(model, 0.0)
        buffers = ChangingBuffers(model, {}, {*averages.names(), *averages.counters()})

        def watch(buffers: ChangingBuffers = buffers) -> None:
            buffers.mark()
            buffers.check("")

        model.eval()
        passes = []
        for _ in range(2 if quick else 8):
            began = time.perf_counter()
            model(torch.ones(1, *shape)).sum().backward()
            passes.append((time.perf_counter() - began) * 1e6)
        work, count = f"{name}, {len(list(model.buffers()))} buffers", 2 if quick else 50
        found += [
            Row(work, "watching buffers and frozen parameters", "us a step", means_us(watch, count)),
            Row(work, "a pass forward and back over one row", "us", passes[1:]),
        ]
    torch.set_num_threads(threads)
    return found


def main() -> None:
    print(table(measure(False)))


if __name__ == "__main__":
    main()
