"""The rows of a run as one process reads them: both splits, and which of them make up which global batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtf.api.sampler import Epochs, Sequential
from dtf.config.settings import Settings
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Shard
from dtf.data.loader import Loader
from dtf.model.forward import stand_ins


class Rows:
    """Opens the data. `recipe`, `sampler`: names of the options, for messages. DataError for a split without rows."""

    def __init__(self, settings: Settings, recipe: str, sampler: str, pin: bool) -> None:
        self._settings, self._recipe, self._sampler, self._pin = settings, recipe, sampler, pin
        self.train, self.eval = (settings.recipe.open_data(split, settings.seed) for split in ("train", "eval"))
        if not len(self.train) or not len(self.eval):
            raise DataError(
                f"recipe={recipe}: {len(self.train)} training and {len(self.eval)} evaluation rows; both need at "
                "least one"
            )
        self.fingerprint = self.train.fingerprint() + settings.sampler.fingerprint()

    def cut(self) -> Epochs:
        """Into global batches, before `loader`; those of the training split.

        ConfigError or DataError where the options leave none.
        """
        settings, batch = self._settings, self._settings.step.batch_size
        if settings.sampler.repeats and not self.train.repeats:
            raise ConfigError(
                f"sampler={self._sampler} shows rows several times, and the data of recipe={self._recipe} has one "
                "view of each"
            )
        epochs = Epochs(settings.sampler, len(self.train), batch, settings.seed, self.train.groups(), self.train.runs())
        if not epochs.batches:
            raise DataError(
                f"step.batch_size={batch} is more than the {len(self.train)} training rows, sampler.tail=drop leaves "
                "none; lower it"
            )
        eval_epochs = Epochs(Sequential(), len(self.eval), batch, settings.seed, runs=self.eval.runs())
        self._splits = {"train": (self.train, epochs), "eval": (self.eval, eval_epochs)}
        return epochs

    def loader(self, split: str, shard: Shard | None, micro_batch_rows: int) -> Loader:
        """One share of a split's global batches."""
        return Loader(*self._splits[split], shard, micro_batch_rows, pin=self._pin)

    def sample(self, rows: int) -> Any:
        """Inputs of so many training rows, as the model gets them; zeros for rows of sparse tables."""
        recipe = self._settings.recipe
        return stand_ins(recipe.receive(self.train.fetch(np.arange(rows) % len(self.train), 0)[0]), recipe.tables())
