"""The parts of `python -m bench`: what each measures, and with which peers."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from bench.rows import Row


class Part(NamedTuple):
    """`module` has `measure(quick) -> list[Row]`."""

    module: str
    title: str
    peers: tuple[str, ...] = ()

    def measure(self, quick: bool) -> list[Row]:
        return importlib.import_module(self.module).measure(quick)


PARTS = {
    "overhead": Part("bench.overhead", "What the engine adds to a step", ("trainers",)),
    "resnet18": Part("bench.end_to_end", "A ResNet-18 of 224 pixels", ("trainers",)),
    "start": Part("bench.startup", "From the command to the first step of two ranks", ("trainers",)),
    "recovery": Part("bench.recovery", "From kill -9 of a rank to the next step"),
    "checkpoints": Part("bench.checkpoints", "Writing and reading a checkpoint"),
}
