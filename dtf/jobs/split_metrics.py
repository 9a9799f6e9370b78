"""The metrics of a module over rows with labels, by one process: of what an export writes, as it will be called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dtf.api.recipe import Dataset
from dtf.api.task import Task
from dtf.config.settings import Settings
from dtf.core.types import Place, Shard
from dtf.data.splits import evaluation_loader
from dtf.distributed.world import World
from dtf.engine.evaluation import counted
from dtf.model.forward import ForwardPass
from dtf.model.receive import Receiver


@torch.no_grad()
def split_metrics(settings: Settings, model: nn.Module, rows: Dataset, beat: Callable[[], None]) -> dict[str, float]:
    """The recipe's metrics of `model`, which takes ids in place of rows of sparse tables, each row once.

    DataError when more rows cannot be read than the recipe allows.
    """
    recipe = settings.recipe
    task = Task(
        recipe, settings.optimizer, settings.precision, settings.step, settings.seed, None, None, settings.sparse
    )
    passes, receiver, world = ForwardPass(task, torch.device("cpu")), Receiver(task), World(Place())
    evaluator, total = recipe.evaluator(len(rows)), None
    loader = evaluation_loader(rows, Shard(0, 1), settings.step.evaluation_rows)
    try:
        for index in range(loader.batches):
            beat()
            loader.ahead([(0, i) for i in range(index, min(index + 1 + loader.prefetch, loader.batches))])
            batch = loader.get(0, index)
            assert batch is not None
            batch = receiver.evaluate(batch)
            outputs, loss = passes.losses(passes.forward(model, batch.inputs), batch)
            sums, told = passes.evaluated(outputs, batch, loss)
            total = sums if total is None else total + sums
            if evaluator is not None and told is not None:
                evaluator.add(told)
        assert total is not None
        values, _ = counted(world, total, recipe, len(rows), loader.bad(0), rows.allowed)
    finally:
        loader.close()
    return values | (evaluator.values(world) if evaluator is not None else {})
