"""`Recipe.receive`, called once for each micro-batch, under a seed of that micro-batch.

So what it draws, and what it makes of all rows that it sees, is the same whichever rank calls it, and however early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from dtf.api.recipe import Recipe
from dtf.api.task import Task
from dtf.core import nest
from dtf.core.seeding import seed_of
from dtf.core.types import Batch
from dtf.model.forward import rows_of

EVALUATION = -1
"""Stands for the step in keys of random numbers in an evaluation. Its micro-batches are told apart by first rows."""


class Receiver:
    """The `receive` of a recipe, under seeds."""

    lock = threading.RLock()
    """Held by a thread that seeds torch's global generator, which is one for all, or must not have it seeded meanwhile.
    """

    def __init__(self, task: Task) -> None:
        self._recipe, self._seed = task.recipe, task.seed
        self._changes = type(task.recipe).receive is not Recipe.receive
        self.early = self._changes and bool(task.recipe.tables())
        """Whether it has to be called before rows of sparse tables are looked up, as it may change ids."""

    def train(self, batch: Batch, step: int, micro_batch: int) -> Batch:
        """A micro-batch of a step, with the inputs of the model. `micro_batch`: its number in the global batch."""
        return self._receive(batch, step, micro_batch)

    def evaluate(self, batch: Batch) -> Batch:
        """A micro-batch of an evaluation, known by its first row, with the inputs of the model."""
        return self._receive(batch, EVALUATION, int(batch.ids[0]))

    def join(self, batch: Batch, bounds: Sequence[int], receive: Callable[[Batch, int], Batch]) -> Batch:
        """All micro-batches of a batch, each by `receive(micro_batch, number)`, as one batch again.

        `bounds`: where it is cut. Padding, which has no bounds, is one micro-batch.
        """
        if not self._changes:
            return batch
        if len(bounds) <= 2:
            return receive(batch, 0)
        parts = [receive(rows_of(batch, *ends), j).inputs for j, ends in enumerate(pairwise(bounds))]
        return batch._replace(inputs=nest.concatenate(parts))

    def _receive(self, batch: Batch, step: int, number: int) -> Batch:
        if not self._changes:
            return batch
        key, device = seed_of(self._seed, "receive", step, number), batch.weight.device
        with self.lock:
            torch.default_generator.manual_seed(key)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index or 0].manual_seed(key)
            return batch._replace(inputs=self._recipe.receive(batch.inputs))
