"""The splits of a run's data, and the global batches that they are cut into."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import name_of
from dtf.api.sampler import Sampler, row_traits
from dtf.core.errors import DataError
from dtf.core.types import WHOLE, Batch, Shard
from dtf.data.answers import opened, refuse_loose_bags
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.model.forward import zero_rows_for_tables


class FirstRows(Dataset):
    """The first `count` rows of a data set."""

    def __init__(self, rows: Dataset, count: int) -> None:
        self._rows, self._count = rows, count
        self.wrapped = rows
        self.prefetch, self.queue_rows, self.threads = rows.prefetch, rows.queue_rows, rows.threads
        self.bad, self.allowed, self.left_out = rows.bad, rows.allowed, rows.left_out
        self.shapes_vary = rows.shapes_vary

    def __len__(self) -> int:
        return self._count

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        return self._rows.fetch(ids, epoch)

    def runs(self) -> np.ndarray | None:
        bounds = self._rows.runs()
        return None if bounds is None else np.append(bounds[bounds < self._count], self._count)

    def fingerprint(self) -> str:
        return self._rows.fingerprint()


def evaluation_loader(
    rows: Dataset, shard: Shard | None, micro_batch_rows: int, count: int = 0, pin: bool = False
) -> Loader:
    """A loader of rows in order, for an evaluation. A batch is `count` micro-batches, 0: one for each share.

    Micro-batches begin at multiples of `micro_batch_rows`, whatever `count` is; the last one is the rest.
    """
    batch = micro_batch_rows * (count or (shard.count if shard else 1))
    epochs = Epochs(Sequential(), len(rows), batch, 0, runs=rows.runs())
    return Loader(rows, epochs, shard, micro_batch_rows, pin, join=False)


class Splits:
    """Opens the data of a recipe. `batch`: rows of a global batch; `pin`: pin the memory of batches; `eval_rows`: as
    `train.eval_rows`. Not collective. DataError for a split without rows.
    """

    def __init__(self, recipe: Recipe, sampler: Sampler, batch: int, seed: int, pin: bool, eval_rows: int = 0) -> None:
        self._recipe, self._sampler, self._batch, self._seed, self._pin = recipe, sampler, batch, seed, pin
        self.train, self.eval = (opened(recipe, split, seed) for split in ("train", "eval"))
        if not len(self.train) or not len(self.eval):
            raise DataError(
                f"recipe={name_of('recipe', recipe)}: {len(self.train)} training and {len(self.eval)} evaluation rows; "
                "both need at least one"
            )
        if 0 < eval_rows < len(self.eval):
            self.eval = FirstRows(self.eval, eval_rows)
        self.fingerprint = self.train.fingerprint() + sampler.fingerprint()

    def cut(self) -> Epochs:
        """Cut the splits into global batches. Called before `loader`. Returns the batches of the training split.

        ConfigError or DataError where the options leave no batch.
        """
        sampler, batch = self._sampler, self._batch
        groups, runs = self.train.groups(), self.train.runs()
        sampler.check_rows(row_traits(self.train.repeats, groups, runs), f"recipe={name_of('recipe', self._recipe)}")
        epochs = Epochs(sampler, len(self.train), batch, self._seed, groups, runs)
        if not epochs.batches:
            raise DataError(
                f"step.batch_size={batch} is more than the {len(self.train)} training rows, sampler.tail=drop leaves "
                "none; lower it"
            )
        self._epochs = epochs
        return epochs

    def loader(self, split: str, shard: Shard | None, micro_batch_rows: int, count: int = 0) -> Loader:
        """A loader for one share of a split's global batches. `count`: micro-batches of a batch of the split `eval`,
        see `evaluation_loader`; 0: one for each share.
        """
        if split == "train":
            return Loader(self.train, self._epochs, shard, micro_batch_rows, pin=self._pin)
        return evaluation_loader(self.eval, shard, micro_batch_rows, count, self._pin)

    def first_rows(self, index: int, count: int = 8) -> Batch:
        """The first rows of a global batch of training, the same on all ranks, for a trial. Here and in
        `first_eval_rows`: ConfigError for Bags that no table has.
        """
        loader = self.loader("train", WHOLE, count)
        try:
            rows = loader.rows(self._epochs.ids(0, index)[:count], 0)
        finally:
            loader.close()
        refuse_loose_bags(self.train, rows, self._recipe)
        return rows

    def first_eval_rows(self, count: int) -> Batch:
        """The first rows of the evaluation, for a trial; so many at most. The same on all ranks."""
        loader = evaluation_loader(self.eval, WHOLE, count)
        try:
            rows = loader.rows(np.arange(min(count, len(self.eval))), 0)
        finally:
            loader.close()
        refuse_loose_bags(self.eval, rows, self._recipe)
        return rows

    def sample(self, rows: int) -> Any:
        """Inputs of so many training rows, as the model gets them, with zeros in place of rows of sparse tables."""
        recipe = self._recipe
        return zero_rows_for_tables(
            recipe.receive(self.train.fetch(np.arange(rows) % len(self.train), 0)[0]), recipe.tables()
        )
