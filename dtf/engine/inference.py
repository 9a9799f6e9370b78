"""Inference with a trained model: rows in order through any strategy's program, their predictions to rank 0."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dtf.api.options import Remat
from dtf.api.precision import set_switches
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import lookup, name_of
from dtf.api.task import Task
from dtf.config.settings import Settings
from dtf.core import nest
from dtf.core.errors import ConfigError, DataError, DtfError, Preempted, by_all
from dtf.core.types import Batch, Evaluated, Event, Measured, Place
from dtf.data.splits import evaluation_loader
from dtf.distributed.sharding import is_dtensor
from dtf.distributed.world import World
from dtf.engine.predictions import Prediction
from dtf.engine.program_check import check_program
from dtf.model.class_probabilities import class_probabilities
from dtf.model.forward import zero_rows_for_tables
from dtf.model.init import construct
from dtf.model.pretrained import Weights, match_weights, open_weights
from dtf.sparse.stored_table import frozen

REPORT_S = 5.0
"""Seconds between two reports of progress."""


class Rest(Dataset):
    """The rows of a data set from `first` on."""

    def __init__(self, rows: Dataset, first: int) -> None:
        self._rows, self._first = rows, first
        self.wrapped = rows
        self.prefetch, self.queue_rows, self.threads = rows.prefetch, rows.queue_rows, rows.threads
        self.bad, self.allowed, self.shapes_vary = _FromFirst(rows.bad, first), rows.allowed, rows.shapes_vary

    def __len__(self) -> int:
        return len(self._rows) - self._first

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        return self._rows.fetch(ids + self._first, epoch)


def _allow_all(rows: Dataset | None) -> None:
    """Let any number of rows be unreadable, also where a data set wraps another one."""
    while rows is not None:
        rows.allowed = len(rows)
        rows = getattr(rows, "wrapped", None)


class _FromFirst(Mapping[int, str]):
    """A mapping of rows whose numbers are counted from `first` on."""

    def __init__(self, rows: Mapping[int, str], first: int) -> None:
        self._rows, self._first = rows, first

    def __getitem__(self, row: int) -> str:
        return self._rows[row + self._first]

    def __iter__(self) -> Iterator[int]:
        return (row - self._first for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass
class _Record:
    """The predictions of this rank since they were last taken.

    Its `measure` is the recipe's, and also records the probabilities of each row.
    """

    recipe: Recipe
    top: int  # how many classes to keep of each row
    required: bool  # whether each row must get a prediction
    rows: list[list[Any]]

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        whole = tree_map(lambda t: t.full_tensor() if isinstance(t, Tensor) and is_dtensor(t) else t, outputs)  # type: ignore[attr-defined]
        probabilities = class_probabilities(self.recipe, whole, batch.targets)
        if probabilities is None and self.required:
            raise ConfigError(
                f"{type(self.recipe).__name__}.probabilities() is not defined, and what this model gives are no scores "
                f"(B, C) of classes; {self.recipe.without_probabilities}"
            )
        if probabilities is None:
            self.rows += [[id, None, [], [], 0] for id in batch.ids.tolist() if id >= 0]
            return self.recipe.measure(outputs, batch, loss)
        if probabilities.dim() == 1:
            best, order = probabilities[:, None], torch.zeros_like(probabilities[:, None], dtype=torch.int64)
        else:
            best, order = probabilities.topk(min(self.top, probabilities.shape[1]), dim=1)
        single = isinstance(batch.targets, Tensor) and batch.targets.dim() == 1
        labels = batch.targets.tolist() if single else [None] * len(batch.ids)
        width = probabilities.shape[1] if probabilities.dim() > 1 else 0
        for id, weight, label, classes, chance in zip(
            batch.ids.tolist(), batch.weight.tolist(), labels, order.tolist(), best.tolist(), strict=True
        ):
            if id >= 0:
                # a row that could not be read has no label in a table; where a prediction is asked for it has an error
                self.rows.append([id, label if weight else None, classes, chance, width])
        return self.recipe.measure(outputs, batch, loss)

    def take(self) -> list[list[Any]]:
        """The recorded rows, which are then forgotten."""
        taken, self.rows = self.rows, []
        return taken


class Inference:
    """A model with its numbers on a world of ranks, and the rows to put through it. Collective."""

    def __init__(
        self, settings: Settings, place: Place, model: str, data: Callable[[Recipe], Dataset], top: int, whole: bool
    ) -> None:
        """`whole`: each row gets a prediction, or an error where it cannot be read, whatever the recipe allows; a model
        that gives none is an error.
        """
        torch.set_num_threads(place.threads)
        set_switches(settings.precision)
        kind = place.device.partition(":")[0]
        self.world = World.join(place, settings.strategy.communication(kind))
        self.recipe, self._kind, self._micro_batch_rows = settings.recipe, kind, settings.step.evaluation_rows
        stored = open_model(settings, model)
        self.rows = data(settings.recipe)
        if not len(self.rows):
            raise DataError("there are no rows to use the model on")
        if whole:
            _allow_all(self.rows)  # `batches` has a limit of its own
        self.weights = weights_of(settings, model, stored)
        digest = self.weights.digest() if self.world.rank == 0 else ""
        self.digest: str = self.world.broadcast(digest)
        self.names = names_of(self.recipe, self.weights)
        self.unread = 0  # rows of the data that this rank could not read so far
        self._record = _Record(self.recipe, top, whole, [])
        recipe = copy.copy(self.recipe)
        vars(recipe)["measure"] = self._record.measure  # type: ignore[index]
        step = replace(settings.step, ema=0.0, micro_batch_rows=self._micro_batch_rows, remat=Remat.none)
        optimizer = lookup("optimizer", "sgd")(momentum=0.0)  # without state
        rows = frozen(settings.sparse, self.weights)
        task = Task(recipe, optimizer, settings.precision, step, settings.seed, self._sample, self.weights, rows)
        strategy = settings.strategy
        self.program = check_program(strategy.setup(task, self.world), name_of("strategy", strategy), self.world)
        if self.program.shard is None:  # what it is sent is of the classes that the data have
            nest.know_classes(self.rows.fetch(np.arange(1), 0))

    def batches(
        self,
        first: int,
        beat: Callable[[str, int], None],
        stop: Callable[[], bool],
        bad: int = 0,
        most_bad: float = math.inf,
    ) -> Iterator[tuple[int, Evaluated, list[Prediction]]]:
        """For each batch from row `first` on: the rows done so far, what this rank measured, and on rank 0 the
        predictions in order. Collective.

        Micro-batches are those of an evaluation of all rows: of one that has `first` in its middle, the rows before it
        are computed again, for what the model or `Recipe.receive` makes of several rows.

        `bad`: rows before `first` that could not be read; `most_bad`: how many may be so in all.

        Preempted on all ranks, after the current batch, when one was asked to stop; DataError likewise when more than
        `most_bad` rows could not be read. DtfError when a row is lost.
        """
        self._refuse_bad(bad, first, most_bad)
        start = first - first % self._micro_batch_rows
        count = self.program.evaluation_micro_batches
        loader = evaluation_loader(
            Rest(self.rows, start),
            self.program.shard,
            self._micro_batch_rows,
            count,
            pin=self._kind == "cuda",
        )
        done = first
        try:
            with torch.no_grad():
                for index in range(loader.batches):
                    beat("evaluate", index)
                    loader.ahead([(0, i) for i in range(index, min(index + 1 + loader.prefetch, loader.batches))])
                    batch = loader.get(0, index)
                    if batch is not None:
                        batch = batch._replace(ids=np.where(batch.ids < 0, batch.ids, batch.ids + start))
                    measured = self.program.eval_step(self.program.prepare(batch))
                    self.unread = loader.bad(0)
                    end = start + (index + 1) * count * self._micro_batch_rows
                    expected = range(done, min(end, len(self.rows)))
                    predictions = self._gathered(expected)
                    yield expected.stop, measured, predictions
                    done = expected.stop
                    here = [float(stop()), float(sum(bool(row.error) for row in predictions))]  # of rank 0
                    stops, errors = self.world.reduce(torch.tensor(here, dtype=torch.float64)).tolist()
                    bad += int(errors)
                    self._refuse_bad(bad, done, most_bad)
                    if stops and done < len(self.rows):
                        raise Preempted(
                            f"asked to stop after {done} of {len(self.rows)} rows; start again with the same run.dir "
                            "to go on"
                        )
        finally:
            loader.close()

    def _refuse_bad(self, bad: int, done: int, most_bad: float) -> None:
        """Raise DataError on all ranks when more rows cannot be read than are allowed."""
        if bad > most_bad:
            text = f"{bad} of {done} rows cannot be read, job.bad_share allows {most_bad:g} of all {len(self.rows)}"
            raise by_all(DataError(f"{text}; repair them, or raise it and start again with the same run.dir"))

    def _gathered(self, expected: range) -> list[Prediction]:
        bad = self.rows.bad  # of the rows that this rank reads, which may be others than those that it computes
        parts = self.world.gather([self._record.take(), [[row, bad[row]] for row in expected if row in bad]])
        if parts is None:
            return []
        # ranks that compute a row together all record it
        predictions = {id: Prediction(id, *rest) for part, _ in parts for id, *rest in part if id >= expected.start}
        for row, error in (pair for _, part in parts for pair in part):
            predictions[row] = Prediction(row, None, [], [], 0, error)
        if sorted(predictions) != list(expected):
            raise DtfError(
                f"rows {expected.start} to {expected.stop - 1} gave {len(predictions)} answers; a row was lost or "
                "counted twice; please report this"
            )
        return [predictions[id] for id in expected]

    def _sample(self, rows: int) -> Any:
        return zero_rows_for_tables(
            self.recipe.receive(self.rows.fetch(np.arange(rows) % len(self.rows), 0)[0]), self.recipe.tables()
        )


def weights_of(settings: Settings, model: str, stored: Weights | None = None) -> Weights:
    """All numbers of the recipe's model: those at the place that `job.model` names, else recipe.model.weights.

    `stored`: what is there, where it is open already.
    """
    key = "job.model" if model else "recipe.model.weights"
    weights = stored or open_model(settings, model)
    return match_weights(weights, settings.recipe, construct(settings.recipe), key, whole=True)[0]


def open_model(settings: Settings, model: str) -> Weights:
    """The numbers at the place that `job.model` names, else recipe.model.weights, whatever they are of. The recipe is
    told which classes they know.
    """
    place, key = (model, "job.model") if model else (settings.recipe.fine_tuning.weights, "recipe.model.weights")
    stored = open_weights(place, key)
    if known := stored.scalars.get("classes"):
        settings.recipe.use_classes(tuple(map(str, known)))
    return stored


def names_of(recipe: Recipe, weights: Weights) -> tuple[str, ...]:
    """The names of classes: those of the run that made the weights, else those of the recipe's data."""
    return tuple(map(str, weights.scalars.get("classes") or recipe.class_names()))


class Pace:
    """Reports of progress through `count` of `what`, `REPORT_S` apart."""

    def __init__(self, send: Callable[[Event], None], what: str, count: int) -> None:
        self._send, self._what, self._count, self._started = send, what, count, time.perf_counter()
        self._reported_at = self._started
        self._before: int | None = None

    def report(self, done: int) -> None:
        now = time.perf_counter()
        if self._before is None:
            self._before, self._started = done, now  # the first batch is slower than those to come
        elif now - self._reported_at >= REPORT_S:
            self._reported_at = now
            values = {
                self._what: float(self._count),
                f"{self._what}_per_s": (done - self._before) / (now - self._started),
            }
            self._send(Measured(self._what, done, done / self._count, now - self._started, values))
