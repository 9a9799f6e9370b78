"""Whether what a step of a foreign module returns and logs is a mean over rows: the values of two parts of some rows
must make that of all of them. The module computes as in an evaluation, so that rows do not meet in batch statistics.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dtf.model.mean_proof import IGNORED, NOT_TAKEN, Mean, labels

Inputs = Mapping[str, Tensor]
Observe = Callable[[Inputs], Mapping[str, Tensor]]
"""The values of a step for some inputs, by name."""

_CLOSE = {torch.float64: 1e-9}
_CLOSE_OTHERS = 5e-5


class _FixedDraws(TorchDispatchMode):
    """What is drawn is the same number for each row."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            tree_map(
                lambda each: each.fill_(0.5 if each.is_floating_point() else 0) if isinstance(each, Tensor) else 0, made
            )
        return made


@contextmanager
def fixed_draws() -> Iterator[None]:
    """A context in which rows draw alike, whichever others are there. Generators are as before at its end."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), _FixedDraws():
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def in_order(inputs: Inputs, label: str) -> dict[str, Tensor]:
    """The rows by the size of their labels, so that two parts have different ones."""
    sizes = (
        inputs[label].double().nan_to_num().flatten(1).mean(1) if inputs[label].dim() > 1 else inputs[label].double()
    )
    order = sizes.nan_to_num().argsort(stable=True)
    return {name: tensor[order] for name, tensor in inputs.items()}


@torch.no_grad()
def no_means(observe: Observe, inputs: Inputs, sums: frozenset[str]) -> list[str]:
    """Names of values that are no means over rows; of those in `sums`, that are no sums."""
    count = len(next(iter(inputs.values())))
    whole, failed = observe(inputs), []
    for cut in sorted({max(1, count // 3), count // 2}):
        parts = [(end - first, observe(_rows(inputs, first, end))) for first, end in ((0, cut), (cut, count))]
        for name, value in whole.items():
            made = sum(
                part[name].double() * (1 if name in sums else rows / count) for rows, part in parts if name in part
            )
            if not _close(value, made) and name not in failed:
                failed.append(name)
    return failed


@torch.no_grad()
def loss_mean(observe: Observe, inputs: Inputs, label: str) -> Mean | None:
    """Of what the value `loss` is the mean. None: of neither rows nor labels."""
    count = len(inputs[label])
    if count < 2:
        return None
    cuts = sorted({max(1, count // 3), count // 2})
    by_rows = _splits(observe, inputs, label, cuts, Mean.rows)
    if inputs[label].dtype.is_floating_point or inputs[label].dtype is torch.bool:
        return Mean.rows if by_rows else None
    some = inputs[label].clone()
    first = some[: max(1, count // 3)].reshape(-1)
    first[:: 1 if some.dim() == 1 and len(first) < 2 else 2] = IGNORED
    some[: max(1, count // 3)] = first.view(some[: max(1, count // 3)].shape)
    ignoring = {**inputs, label: some}
    try:
        if _splits(observe, ignoring, label, cuts[-1:], Mean.labels):
            return Mean.labels if _splits(observe, inputs, label, cuts, Mean.labels) else None
        return Mean.rows if by_rows and _splits(observe, ignoring, label, cuts[-1:], Mean.rows) is not False else None
    except (*NOT_TAKEN, KeyError):  # the step takes no such label
        return Mean.rows if by_rows else None


def _splits(observe: Observe, inputs: Inputs, label: str, cuts: list[int], mean: Mean) -> bool | None:
    """Whether the losses of two parts make that of the whole. None where that is not finite."""
    count, whole = len(inputs[label]), observe(inputs)["loss"]
    if not math.isfinite(whole):
        return None
    for cut in cuts:
        total, weights = 0.0, 0.0
        for first, end in ((0, cut), (cut, count)):
            part = _rows(inputs, first, end)
            weight = float(end - first if mean is Mean.rows else labels(part[label]))
            total += weight * float(observe(part)["loss"]) if weight else 0.0
            weights += weight
        if not weights or not _close(whole, torch.tensor(total / weights, dtype=torch.float64)):
            return False
    return True


def _rows(inputs: Inputs, first: int, end: int) -> dict[str, Tensor]:
    return {name: tensor[first:end].clone() for name, tensor in inputs.items()}


def _close(one: Tensor, other: Any) -> bool:
    other = torch.as_tensor(other, dtype=torch.float64)
    bound = _CLOSE.get(one.dtype, _CLOSE_OTHERS)
    return bool(torch.allclose(one.double(), other, rtol=bound, atol=bound * 1e-3, equal_nan=True))
