"""The networks of `bench.toy` as recipes, and dtf's engine for them as a contestant."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.endless import Endless
from bench.toy import LR, MOMENTUM, Work, data, network, rank_and_size
from bench.turns import Run, Turns, contestant
from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.recipe import Dataset, Recipe
from dtf.api.task import Task
from dtf.core.types import Event, Measured, Place
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.engine.loop import Loop, fit
from dtf.host.allocator import keep_freed_memory
from dtf.model.metrics import weighted_sums
from dtf.optim.optimizers import Sgd
from dtf.strategies.ddp import Ddp

if TYPE_CHECKING:
    import numpy as np

    from dtf.core.types import Batch


class Noise(Dataset):
    """Rows in memory."""

    prefetch = 0

    def __init__(self, work: Work) -> None:
        self.inputs, self.targets = data(work)

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(ids)
        return self.inputs[rows], self.targets[rows]


class Case(Recipe):
    """A recipe as docs/own-recipe.md teaches it."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "top1")

    @property
    def objective(self) -> tuple[str, str]:
        return ("top1", "max")

    def check(self) -> None:
        """Nothing can be wrong."""

    def build_model(self) -> nn.Module:
        return network(self.work.model)

    def open_data(self, split: str, seed: int) -> Dataset:
        return Noise(self.work)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, outputs.argmax(-1) == batch.targets)


def engine(work: Work, turns: Turns) -> Run:
    """dtf's engine over this rank's rows."""
    rank, size = rank_and_size()
    torch.set_num_threads(work.threads)
    keep_freed_memory()  # as every rank of a run does
    if size > 1:
        torch.distributed.init_process_group("gloo")
    world, case = World(Place(rank=rank, size=size, slots=size)), Case(work)
    options = StepOptions(batch_size=work.rows)
    task = Task(case, Sgd(momentum=MOMENTUM), Precision(), options, 0, channels_last=work.channels_last)
    program = Ddp(static_graph=work.static_graph).setup(task, world)
    rows, losses = case.open_data("train", 0), []
    epochs = Epochs(Sequential(), len(rows), work.rows, 0)
    clock = Endless(epochs, LR, logs=True, mark=turns.mark)
    loader = Loader(rows, epochs, program.shard, program.micro_batch_rows)

    def see(event: Event) -> None:
        if isinstance(event, Measured):
            losses.append(event.values["loss"])

    loop = Loop(program, clock, loader, loader, 0, case, world, None, see, {}, epochs.batches)

    def run(steps: int) -> float:
        clock.turn(steps)
        fit(loop)
        return losses[-1]

    return run


def main(turns: Turns) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="JSON: the fields of Work")
    run = engine(Work(*json.loads(parser.parse_args().work)), turns)
    turns.ready()
    turns.serve(run)


if __name__ == "__main__":
    contestant(main)
