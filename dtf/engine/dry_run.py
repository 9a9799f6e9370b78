"""What a rank of a dry run does beside training: it times each part, and tells what passes through the model."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dtf.api.recipe import Recipe
from dtf.core.errors import PeerError
from dtf.core.types import Batch, Event, Tried
from dtf.engine.rank import Rank, peer_is_gone
from dtf.model.author_errors import name_author_errors
from dtf.model.class_probabilities import class_probabilities

LEAST_STEPS = 3
"""Steps of the shortest plan that a dry run makes up: two before a save, and one after it."""

_PARTS = {"log": "metrics", "stop": "end", "wait": "start", "rendezvous": "start"}
"""Phases of a rank whose parts are called otherwise."""


class WatchedRank(NamedTuple):
    """A rank, and how it says which part begins."""

    rank: Rank
    enter: Callable[[str], None]


@contextmanager
def watched(rank: Rank) -> Iterator[WatchedRank]:
    """A context for the life of a rank. In a dry run, errors of the recipe's author are named wherever they come, and
    the launching process hears of each part that was tried; otherwise nothing is added.
    """
    if not rank.settings.train.dry_run:
        yield WatchedRank(rank, lambda part: None)
        return
    parts = _Parts(rank)
    settings = replace(rank.settings, recipe=_watched_recipe(rank.settings.recipe, rank.send))
    try:
        with name_author_errors():
            yield WatchedRank(replace(rank, settings=settings, beat=parts.beat), parts.enter)
    except Exception as error:
        if not isinstance(error, PeerError) and not peer_is_gone(error):
            parts.fail()
        raise
    parts.report()


class _Parts:
    """The parts of this rank's life, in order, and the seconds of each."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._seconds = rank, {"start": 0.0}
        self._now, self._since = "start", time.perf_counter()

    def enter(self, part: str) -> None:
        """The part before ends, and this one goes on or begins."""
        now = time.perf_counter()
        self._seconds[self._now] += now - self._since
        self._seconds.setdefault(part, 0.0)
        self._now, self._since = part, now

    def beat(self, phase: str, step: int) -> None:
        self._rank.beat(phase, step)
        self.enter(_PARTS.get(phase, phase))

    def report(self) -> None:
        """Rank 0 tells of all parts."""
        self.enter(self._now)
        if self._rank.place.rank == 0:
            for part, seconds in self._seconds.items():
                self._rank.send(Tried(part, seconds))

    def fail(self) -> None:
        """Rank 0 tells of the parts before, and any rank of this one, which failed."""
        self.enter(self._now)
        failed = self._seconds.pop(self._now)
        if self._rank.place.rank == 0:
            for part, seconds in self._seconds.items():
                self._rank.send(Tried(part, seconds))
        self._rank.send(Tried(self._now, failed, failed=True))


def _watched_recipe(recipe: Recipe, send: Callable[[Event], None]) -> Recipe:
    """The recipe, which once tells the shapes and formats of a batch and of the model's outputs."""
    told = False

    def measure(outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        nonlocal told
        if not told:
            told = True
            send(Tried("shapes", 0.0, describe(outputs, batch)))
            guess = uniform_guess(recipe, outputs, batch)
            if guess:
                send(Tried("guess", 0.0, guess))
        return recipe.measure(outputs, batch, loss)

    again = copy.copy(recipe)
    vars(again)["measure"] = measure
    return again


def describe(outputs: Any, batch: Batch) -> str:
    """`inputs float32 (B, 3, 32, 32), targets int64 (B,), outputs float32 (B, 10)`; B stands for the rows."""
    rows = len(batch.ids)
    named = [("inputs", batch.inputs), ("targets", batch.targets), ("outputs", outputs)]
    return ", ".join(f"{name} {_text(value, rows)}" for name, value in named)


def _text(value: Any, rows: int) -> str:
    if isinstance(value, Tensor):
        axes = ["B" if not i and size == rows else str(size) for i, size in enumerate(value.shape)]
        return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_text(item, rows)}" for name, item in value.items()) + "}"
    leaves = tree_flatten(value)[0]
    if isinstance(value, list | tuple) or leaves != [value]:
        return f"{type(value).__name__}[{', '.join(_text(leaf, rows) for leaf in leaves)}]"
    return type(value).__name__


@torch.no_grad()
def uniform_guess(recipe: Recipe, outputs: Any, batch: Batch) -> str:
    """`2.3026 (ln 10)`: the cross-entropy of a guess that takes all classes for alike. Empty where
    `class_probabilities` does not tell how many there are.
    """
    probabilities = class_probabilities(recipe, outputs, batch.targets)
    if probabilities is None:
        return ""
    classes = 2 if probabilities.dim() == 1 else probabilities.shape[1]
    return f"{math.log(classes):.4f} (ln {classes})" if classes > 1 else ""
