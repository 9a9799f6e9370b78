"""How much faster a pipeline of p ranks trains than one rank, with equal micro-batches and one thread per process on
both sides.

    python -m bench.pipeline                                # ResNet-50 at 128 px on 2 ranks, 8 micro-batches of 4 rows
    python -m bench.pipeline --ranks 4 --schedule gpipe

Both run in the same processes, in turn: the first rank trains the whole model while the others wait, then all train in
the pipeline. The ideal is p m / (m + p - 1). It fails when the losses of both differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from bench.rows import Row, table, with_ratios
from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.core.types import Batch, Place, Train
from dtf.distributed.world import World
from dtf.optim.optimizers import Sgd
from dtf.recipes.resnet.options import ModelOptions, ShapesOptions, Stem
from dtf.recipes.resnet.recipe import ResnetShapes
from dtf.strategies.ddp import Ddp
from dtf.strategies.pipeline.schedules import Schedule
from dtf.strategies.pipeline.strategy import Pipeline

LR = 1e-4


def on_rank(
    rank: int,
    size: int,
    arch: str,
    pixels: int,
    rows: int,
    micro_batches: int,
    schedule: str,
    virtual: int,
    blocks: int,
) -> dict[str, Any]:
    """Seconds per step of both, in turn, and their losses."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    batch_rows = rows * micro_batches
    recipe = ResnetShapes(
        model=ModelOptions(arch=arch, classes=8, stem=Stem.imagenet),
        data=ShapesOptions(pixels=pixels, train_rows=batch_rows, eval_rows=8),
    )
    data = recipe.open_data("train", 0)
    ids = np.arange(batch_rows)
    inputs, targets = data.fetch(ids, 0)
    options = StepOptions(batch_size=batch_rows, micro_batch_rows=rows)
    task = Task(recipe, Sgd(), Precision(), options, 0, lambda count: data.fetch(np.arange(count), 0)[0])
    pipeline = Pipeline(schedule=Schedule[schedule], virtual=virtual).setup(task, World(Place(rank=rank, size=size)))
    alone = Ddp().setup(task, World(Place(rank=0, size=1))) if rank == 0 else None

    def train(program: Program, number: int) -> tuple[float, float]:
        whole = Batch(inputs, targets, torch.ones(batch_rows), ids)
        started = time.perf_counter()
        batch = program.prepare(whole if program.shard else None)
        sums = program.step(Train(number, 0, 0, batch_rows, LR), batch).sums
        return time.perf_counter() - started, float(sums[1]) / batch_rows

    result: dict[str, Any] = {"alone": [], "pipeline": [], "losses": [], "table": pipeline.about()["stages"]}
    for number in range(blocks + 1):
        first, loss = train(alone, number) if alone else (0.0, 0.0)
        dist.barrier()
        second, other = train(pipeline, number)
        heard = torch.tensor([other])
        dist.all_reduce(heard)  # the last rank computes the loss, the others have zero
        result["losses"].append([loss, float(heard)])
        dist.barrier()
        result["alone"].append(first)
        result["pipeline"].append(second)
    return result


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b", choices=[schedule.name for schedule in Schedule])
    parser.add_argument("--virtual", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=20)
    return parser


def compare(given: argparse.Namespace) -> list[Row]:
    from tests.support.ranks import ranks

    arguments = {key: value for key, value in vars(given).items() if key != "ranks"}
    found = ranks(given.ranks, "bench.pipeline:on_rank", timeout_s=3600, **arguments)[0]
    apart = max(abs(a - b) / abs(a) for a, b in found["losses"])
    if not apart < 1e-4:
        raise SystemExit(f"both must compute the same losses, they are {apart:.1e} apart: {found['losses']}")
    alone, pipeline = found["alone"][1:], found["pipeline"][1:]  # the first warms up
    p, m, v = given.ranks, given.micro_batches, given.virtual
    ideal = p * v * m / (v * m + p - 1)
    work = f"{given.arch}, {given.pixels} pixels, {m} micro-batches of {given.rows} rows, one thread a rank"
    who, settings = f"dtf, pipeline of {p} ranks", f"{given.schedule}; at best {ideal:.2f} times as fast"
    rows = [Row(work, who, "s a step", pipeline, settings=settings), Row(work, "dtf, one rank", "s a step", alone)]
    return with_ratios(rows, who)


QUICK = ["--arch", "resnet18", "--pixels", "64", "--rows", "2", "--micro-batches", "2", "--blocks", "1"]


def measure(quick: bool) -> list[Row]:
    return compare(options().parse_args(QUICK if quick else []))


def main() -> None:
    print(table(compare(options().parse_args())))


if __name__ == "__main__":
    main()
