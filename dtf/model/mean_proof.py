"""Of what a scalar loss is the mean: the losses of two parts of some rows must make that of all of them.

The rows are those of a micro-batch, repeated, with labels of all classes and, where the loss takes them, labels that it
may leave out. All of it is computed on the CPU, where a label that is out of range is an error like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

IGNORED = -100
"""The label that torch's losses leave out, `ignore_index`."""
_LEFT_OUT = (-1, 255, 0, 1)
"""Labels that others leave out, and classes that may weigh more than others."""
_LEFT_OUT_NUMBERS = (0.0, -1.0, math.nan)
"""As `_LEFT_OUT`, of targets that are numbers."""
_ROWS = 24
_MOST_BYTES = 1 << 26
"""Of outputs."""
_CLOSE = {torch.float64: 1e-9, torch.float32: 2e-5}
NOT_TAKEN = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)
"""Errors of a loss, or of a step, that does not take such rows."""


class Mean(Enum):
    """Of what a scalar loss is the mean."""

    rows = "rows"
    labels = "labels"  # those that are not IGNORED


class _Rows(NamedTuple):
    outputs: Any
    targets: Tensor


@torch.no_grad()
def proved(loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> Mean | None:
    """Of what `loss(outputs, targets)` is the mean. None: of neither rows nor labels, or there are several tensors of
    targets, of which none is known to be the labels. Waits for the device.
    """
    if not isinstance(targets, Tensor):
        return None
    if not len(targets):
        return None
    for device, dtype in (("cpu", torch.float64), ("cpu", None), (targets.device.type, None)):
        rows = _repeated(outputs, targets, torch.device(device), dtype)
        for labelled in _varied(rows):
            try:
                whole = loss(*labelled)
            except NOT_TAKEN:
                continue
            if isinstance(whole, Tensor) and not whole.shape:
                return _mean(loss, labelled, _CLOSE.get(whole.dtype, 2e-2))
    return None


def _mean(loss: Callable[[Any, Tensor], Tensor], rows: _Rows, close: float) -> Mean | None:
    targets = rows.targets
    whole_numbers = not (targets.dtype.is_floating_point or targets.dtype is torch.bool)
    left_out = (IGNORED, *_LEFT_OUT) if whole_numbers else _LEFT_OUT_NUMBERS if targets.dtype is not torch.bool else ()
    varied = [_Rows(rows.outputs, each) for each in (targets, *(_with(targets, label) for label in left_out))]
    if whole_numbers:
        found = [_splits(loss, each, Mean.labels, close) for each in varied]
        if found[0] and found[1] and all(each is not False for each in found):
            return Mean.labels
    found = [_splits(loss, each, Mean.rows, close) for each in varied]
    return Mean.rows if found[0] and all(each is not False for each in found) else None


def _splits(loss: Callable[[Any, Tensor], Tensor], rows: _Rows, mean: Mean, close: float) -> bool | None:
    """Whether the losses of two parts make that of the whole, wherever it is cut. None where the loss does not take
    these rows, or is not finite for them.
    """
    count = len(rows.targets)
    try:
        whole = float(loss(*rows))
        if not math.isfinite(whole):
            return None
        # classes with some weights are balanced on both sides of one cut
        return all(
            _splits_at(cut, loss, rows, mean, close * max(1e-6, abs(whole)), whole)
            for cut in (count // 3, count // 2 + 1, count - 5)
        )
    except NOT_TAKEN:
        return None


def _splits_at(
    cut: int, loss: Callable[[Any, Tensor], Tensor], rows: _Rows, mean: Mean, bound: float, whole: float
) -> bool:
    count, total, weights = len(rows.targets), 0.0, 0.0
    for first, last in ((0, cut), (cut, count)):
        part = rows.targets[first:last]
        weight = float(last - first if mean is Mean.rows else labels(part))
        total += weight * float(loss(_cut(rows.outputs, count, first, last), part))
        weights += weight
    return weights > 0 and abs(total / weights - whole) <= bound


def labels(targets: Tensor) -> Tensor:
    """How many labels are not IGNORED, ()."""
    return (targets != IGNORED).sum()


def _with(targets: Tensor, label: float) -> Tensor:
    """The targets with every other label of the first rows replaced: parts do not have alike many of them."""
    some = targets.clone()
    first = some[: len(some) // 3].reshape(-1)
    first[::2] = label if _fits(label, targets.dtype) else targets.flatten()[0]
    some[: len(some) // 3] = first.view(some[: len(some) // 3].shape)
    return some


def _fits(label: float, dtype: torch.dtype) -> bool:
    if dtype is torch.bool or dtype.is_floating_point:
        return True
    info = torch.iinfo(dtype)
    return info.min <= label <= info.max


def _varied(rows: _Rows) -> Iterator[_Rows]:
    """The rows with targets of which one part has other sums and counts than another, as far as their form allows; then
    as they are.

    Labels of all classes, low ones first, where outputs tell how many there are. Numbers that get smaller from row to
    row, and stay on their side of zero. Half of what is true, in the first rows, made false.
    """
    classes, targets = _classes(*rows), rows.targets
    if classes > 1:
        numbers = torch.arange(targets.numel()).view(targets.shape) * classes // targets.numel()
        yield rows._replace(targets=numbers.to(targets))
    elif targets.dtype.is_floating_point:
        yield rows._replace(targets=targets * _by_row(torch.linspace(1.0, 0.1, len(targets)), targets))
    elif targets.dtype is torch.bool:
        yield rows._replace(targets=_with(targets, False))
    yield rows


def _by_row(factors: Tensor, like: Tensor) -> Tensor:
    """Factors (B,) in a shape that multiplies rows (B, ...)."""
    return factors.to(like).view(-1, *(1 for _ in like.shape[1:]))


def _classes(outputs: Any, targets: Tensor) -> int:
    """How many classes outputs (B, C, ...) or (B, ..., C) have for labels (B, ...). 0 for others."""
    integers = not (targets.dtype.is_floating_point or targets.dtype is torch.bool)
    if not isinstance(outputs, Tensor) or not integers or outputs.dim() != targets.dim() + 1:
        return 0
    by_axis = ((1, (*outputs.shape[:1], *outputs.shape[2:])), (-1, outputs.shape[:-1]))
    return min((outputs.shape[axis] for axis, others in by_axis if tuple(others) == tuple(targets.shape)), default=0)


def _count(outputs: Any, targets: Tensor) -> int:
    """How many rows the proof takes: enough for labels of all classes, in bounded memory."""
    wanted = -(-3 * _classes(outputs, targets) // max(1, targets[0].numel()))
    row_bytes = outputs[0].numel() * 8 if isinstance(outputs, Tensor) else _MOST_BYTES // _ROWS
    return max(_ROWS, len(targets), min(wanted, _MOST_BYTES // max(1, row_bytes)))


def _repeated(outputs: Any, targets: Tensor, device: torch.device, dtype: torch.dtype | None) -> _Rows:
    """Copies of the rows, each with somewhat smaller outputs."""
    count = len(targets)
    number = _count(outputs, targets)
    at = torch.arange(number, device=targets.device) * count // number  # copies of a row together: parts have others
    shrink = torch.linspace(1.0, 0.7, number, dtype=torch.float64)

    def repeat(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _fields(value, repeat)
        value = value.detach()
        if value.dim() and value.shape[0] == count:
            value = value[at.to(value.device)]
            if value.dtype.is_floating_point:
                value = value * _by_row(shrink, value)
        value = value.to(device)
        return value.to(dtype) if dtype is not None and value.dtype.is_floating_point else value

    targets = targets.detach()[at].to(device)
    if dtype is not None and targets.dtype.is_floating_point:
        targets = targets.to(dtype)
    return _Rows(tree_map(repeat, outputs), targets)


def _cut(outputs: Any, rows: int, first: int, last: int) -> Any:
    """Rows of whatever tensors have them in a structure."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[first:last] if value.dim() and value.shape[0] == rows else value
        return _fields(value, cut)

    return tree_map(cut, outputs)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a structure, those in the fields of dataclasses too."""
    found: list[Tensor] = []

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            found.append(part)
        return part if isinstance(part, Tensor) else _fields(part, visit)

    tree_map(visit, value)
    return found


def _fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """A dataclass with changed fields; any other value as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: tree_map(change, getattr(value, field.name)) for field in fields(value)})
    return value
