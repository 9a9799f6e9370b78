"""The parts of `python -m bench`: what each measures, and the environments of its peers."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from bench.rows import Row


class Part(NamedTuple):
    """`function` of `module` is `measure(quick) -> list[Row]`."""

    title: str
    module: str
    peers: tuple[str, ...] = ()
    function: str = "measure"

    def measure(self, quick: bool) -> list[Row]:
        return getattr(importlib.import_module(f"bench.{self.module}"), self.function)(quick)


PARTS = {
    "overhead": Part("What the engine adds to a step", "overhead", ("trainers",)),
    "resnet18": Part("Whole steps of a ResNet-18, 224 pixels", "end_to_end", ("trainers",)),
    "resnet50": Part("Whole steps of a ResNet-50, 224 pixels", "end_to_end", ("trainers",), "measure_resnet50"),
    "start": Part("From the command to the first step of two ranks", "first_step", ("trainers",)),
    "recovery": Part("From the death of a rank to the next step", "recovery"),
    "growth": Part("More ranks and more servers", "growth"),
    "starts": Part("The start of many ranks", "growth", function="measure_starts"),
    "clicks": Part("Click-through models", "ctr", ("torchrec", "fuxictr")),
    "rows": Part("Rows of sparse tables alone", "sparse"),
    "tiers": Part("A sparse table larger than its memory", "table_tiers", ("rocksdict",)),
    "checkpoints": Part("Writing and reading a state", "checkpoints"),
    "saves": Part("How long training stands still for a save", "saves"),
    "saved_rows": Part("A save of the rows that changed", "saved_rows"),
    "mirror": Part("What a mirror costs", "mirror"),
    "guard": Part("What a guarded step costs", "guard"),
    "watching": Part("What it costs to watch a model", "watching"),
    "images": Part("Reading images to bytes", "images", ("images",)),
    "images_floats": Part("Reading images to normalised numbers", "images", ("images",), "measure_floats"),
    "images_large": Part("Reading large images to bytes", "images", ("images",), "measure_large"),
    "images_large_floats": Part(
        "Reading large images to normalised numbers", "images", ("images",), "measure_large_floats"
    ),
    "server": Part("Parameter servers on one host, a small model", "pserver", ("paddle",)),
    "server_400": Part("Parameter servers on one host, a large model", "pserver", ("paddle",), "measure_400"),
    "compiled": Part("Compiled models", "compiled"),
    "allocator": Part("Memory of ranks", "allocator"),
    "memory_format": Part("Channels last", "memory_format"),
    "pipeline": Part("A pipeline of two ranks", "pipeline"),
    "logs": Part("Reading click logs", "logs"),
    "rpc": Part("Requests of parameter servers", "rpc"),
}
