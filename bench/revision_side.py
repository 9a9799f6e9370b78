"""A strategy of the checkout of dtf that is on PYTHONPATH, as a contestant of `bench.revisions`.

Steps are those of a program, without a loop around them. Run as a file: an older checkout does not have it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dtf
from bench.turns import Run, Turns, contestant
from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.registry import lookup
from dtf.api.task import Task
from dtf.config.settings import load_parts
from dtf.core.types import Batch, Place, Shard, Train
from dtf.distributed.world import World
from dtf.host.allocator import keep_freed_memory
from dtf.optim.optimizers import Sgd
from dtf.recipes.resnet.options import ModelOptions, ShapesOptions
from dtf.recipes.resnet.recipe import ResnetShapes

LR = 1e-5


def steps_of(given: argparse.Namespace) -> Run:
    """Steps over one batch; the loss of the last one, over all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert Path(dtf.__file__).is_relative_to(os.environ["PYTHONPATH"]), f"this is another dtf: {dtf.__file__}"
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.distributed.init_process_group("gloo")
    load_parts([])
    recipe = ResnetShapes(
        model=ModelOptions(arch=given.arch, classes=8),
        data=ShapesOptions(pixels=given.pixels, train_rows=given.rows, eval_rows=8),
    )
    rows, ids = recipe.open_data("train", 0), np.arange(given.rows)
    options = StepOptions(batch_size=given.rows, micro_batch_rows=given.micro_batch_rows)
    task = Task(recipe, Sgd(), Precision(), options, 0, lambda count: rows.fetch(np.arange(count), 0)[0])
    strategy: Any = lookup("strategy", given.strategy)()
    if given.strategy == "pipeline":
        strategy.balance = strategy.balance.__class__["flops"]  # the same cuts on both sides: no time is measured
    program = strategy.setup(task, World(Place(rank=rank, size=size, slots=size)))

    def prepared(first: int, last: int) -> Batch | None:
        inputs, targets = rows.fetch(ids[first:last], 0)
        batch = Batch(inputs, targets, torch.ones(last - first), ids[first:last])
        return program.prepare(batch if program.shard else None)

    program.warmup(prepared(0, 8))  # the same rows on all ranks
    share = program.shard or Shard(0, 1)
    own = [given.rows * number // share.count for number in (share.index, share.index + 1)]
    number = 0

    def run(steps: int) -> float:
        nonlocal number
        sums = torch.zeros(2, dtype=torch.float64)
        for _ in range(steps):
            sums = program.step(Train(number, 0, 0, given.rows, LR), prepared(*own)).sums[:2].double()
            number += 1
        torch.distributed.all_reduce(sums)
        return float(sums[1] / sums[0])

    return run


def main(turns: Turns) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("--arch", required=True)
    for name in ("--pixels", "--rows", "--micro-batch-rows"):
        parser.add_argument(name, type=int, required=True)
    run = steps_of(parser.parse_args())
    turns.ready()
    turns.serve(run)


if __name__ == "__main__":
    contestant(main)
