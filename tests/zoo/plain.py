"""The loop that a stranger would write: plain torch, no engine. It says what a model starts from and how it learns.

Evaluations leave no trace but in models with the tag `changes in evaluation`, and are left out without it. Two things
it does as docs/own-recipe.md says. Buffers with a rule begin each micro-batch as before the step. In models
with the tag `unused in a step` a parameter without a gradient has one of zero: momentum moves it on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo.entries import ZooModel

EVALUATED, EVAL_EVERY = 23, 2
"""Rows of an evaluation, which cannot be divided evenly, and the steps between two."""


class Plain(NamedTuple):
    """What a plain run measured; see `run`."""

    initial: dict[str, Tensor]
    """Parameters and buffers as the constructor left them, by name; of shared ones the first name."""
    losses: list[float]
    norms: list[float]
    """Of the gradient of each step, before clipping."""


def construct(entry: ZooModel, seed: int = 0) -> nn.Module:
    """The model as its author gets it under this seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return entry.build()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, as copies."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def run(
    entry: ZooModel,
    batches: Sequence[Sequence[int]],
    micro_batch_rows: int,
    lr: float = 0.1,
    clip_norm: float = 1.0,
    training_rows: int = 42,
    precision: str = "",
) -> Plain:
    """SGD with momentum over these global batches of row numbers, cut into micro-batches of so many rows.

    `precision`: that of the entry by default. The loss of a step is the mean over its rows, or the sum of its sums over
    the sum of its counts.
    """
    model = construct(entry)
    wide = (precision or entry.precision) == "fp64"
    initial = tensors_of(model)
    if wide:
        model.double()
    inputs, targets = entry.rows(training_rows, len("train"))
    if wide and targets.is_floating_point():
        targets = targets.double()
    losses, norms = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    model.train()
    changing = Changing(model, _rules(entry, model))
    for rows in batches:
        loss = _step(entry, model, inputs, targets, _cut(rows, micro_batch_rows), wide, changing)
        for parameter in model.parameters() if "unused in a step" in entry.tags else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        norms.append(float(norm))
        if "changes in evaluation" in entry.tags and not len(losses) % EVAL_EVERY:
            _evaluate(entry, model, micro_batch_rows, wide)
    return Plain(initial, losses, norms)


@torch.no_grad()
def _evaluate(entry: ZooModel, model: nn.Module, micro_batch_rows: int, wide: bool) -> None:
    inputs, _ = entry.rows(EVALUATED, len("eval"))
    model.eval()
    for part in _cut(range(EVALUATED), micro_batch_rows):
        model(select(inputs, part, wide))
    model.train()


class Changing:
    """The buffers of a model that have a rule, `mean` or `sum`, in a step of several micro-batches."""

    def __init__(self, model: nn.Module, rules: dict[str, str]) -> None:
        self._model, self._rules = model, rules

    def begin(self) -> None:
        self._before = {name: self._model.get_buffer(name).clone() for name in self._rules}
        self._made: dict[str, list[Tensor]] = {name: [] for name in self._rules}

    def rewind(self) -> None:
        for name, value in self._before.items():
            self._set(name, value.clone())

    def keep(self) -> None:
        for name, values in self._made.items():
            values.append(self._model.get_buffer(name).detach().clone())

    def finish(self) -> None:
        for name, values in self._made.items():
            before, made = self._before[name].double(), torch.stack(values).double()
            new = made.mean(0) if self._rules[name] == "mean" else before + (made - before).sum(0)
            self._set(name, new.to(self._before[name].dtype))

    def _set(self, name: str, value: Tensor) -> None:
        module, _, key = name.rpartition(".")
        self._model.get_submodule(module)._buffers[key] = value


def _rules(entry: ZooModel, model: nn.Module) -> dict[str, str]:
    """Name of each buffer whose micro-batches are joined -> its rule. That of spectral normalisation is dtf's own."""
    rules = {}
    for name, _ in model.named_buffers():
        declared = [rule for pattern, rule in entry.buffers.items() if fnmatch(name, pattern)]
        if "power iteration" in entry.tags and name.endswith(("_u", "_v")):
            declared.append("mean")
        if declared and declared[0] != "local":
            rules[name] = declared[0]
    return rules


def first_loss(entry: ZooModel, rows: int) -> tuple[Tensor, nn.Module]:
    """The loss of a few rows, (), with a graph to differentiate; and the model."""
    model, wide = construct(entry), entry.precision == "fp64"
    inputs, targets = entry.rows(rows, 1)
    if wide:
        model.double()
    loss = entry.loss(model(select(inputs, range(rows), wide)), targets)
    if isinstance(loss, dict):
        loss = torch.stack(list(loss.values()))
    if isinstance(loss, tuple) and loss[1].requires_grad:  # two losses
        loss = loss[0] + loss[1]
    total, count = summed(loss, rows)
    return total / (count or rows), model


def _cut(rows: Sequence[int], micro_batch_rows: int) -> list[Sequence[int]]:
    """The micro-batches; a last one of a single row is joined to the one before it."""
    bounds = [*range(0, len(rows), micro_batch_rows), len(rows)]
    if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
        del bounds[-2]
    return [rows[first:last] for first, last in pairwise(bounds)]


def _step(
    entry: ZooModel,
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    parts: list[Sequence[int]],
    wide: bool,
    changing: Changing,
) -> float:
    """Accumulate the gradients of one global batch; its loss, where there are counts the sum of sums for each row.

    Each part is divided before its backward pass: hooks that clip a gradient see it as large as it is.
    """
    rows, mean = sum(map(len, parts)), 0.0
    waiting = []  # for the counts of all parts
    changing.begin()
    for part in parts:
        labels = targets[list(part)]
        changing.rewind()
        loss = entry.loss(model(select(inputs, part, wide)), labels)
        changing.keep()
        if isinstance(loss, Tensor) and not loss.dim() and bool((targets == -100).any()):  # a mean over labels
            counted = (labels != -100).sum()
            waiting.append((loss * counted, float(counted)))
            mean += float(loss.detach()) * len(part) / rows
            continue
        total, count = summed(loss, len(part))
        if count is None:
            (total / rows).backward()
            mean += float(total.detach()) / rows
        else:
            waiting.append((total, count))
            mean += float(total.detach()) / rows
    changing.finish()
    counts = sum(count for _, count in waiting)
    for total, _ in waiting:
        (total / counts).backward()
    return mean


def select(inputs: Any, rows: Sequence[int], wide: bool) -> Any:
    """Some rows of the inputs; floating ones in fp64 if `wide`."""
    if isinstance(inputs, dict):
        return {name: select(tensor, rows, wide) for name, tensor in inputs.items()}
    chosen = inputs[list(rows)]
    return chosen.double() if wide and chosen.is_floating_point() else chosen


def summed(loss: Any, rows: int) -> tuple[Tensor, float | None]:
    """What an author's loss of a micro-batch adds to that of the global batch: a sum, and its count of labels; None
    where rows are what is counted.
    """
    if isinstance(loss, tuple):
        sums, counts = loss
        return sums.sum(), float(counts.sum())
    if loss.dim() == 0:  # a mean over rows
        return loss * rows, None
    return loss.sum(), None
