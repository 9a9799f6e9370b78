"""Nests of tensors, the form of a batch's inputs and targets: the one place that knows what they are made of.

A nest is a tensor, or a dict, list, tuple or named tuple of nests. Rows are the first axis of every tensor. Rows that
have any number of ids each are `Bags`. The rows of micro-batches that a data set makes one by one, as their shapes may
differ, are a nest for each: `MicroBatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtf.core.errors import ConfigError

_MICRO_BATCHES = "micro-batches"


class Bags(NamedTuple):
    """Ids of a sparse table of which each row has any number, those of all rows one after the other. Memory follows the
    number of ids. The table pools the rows of a bag as torch's EmbeddingBag does, see `Table.pooling`.
    """

    values: Tensor  # (n,) int64: the ids
    lengths: Tensor  # (B,) int64: how many of them each row has; or (B, F): F bags a row, in order

    def rows(self, first: int, last: int) -> Bags:
        """Rows [first, last), in their memory. On meta, where no length is known, they have no ids."""
        lengths = self.lengths.data[first:last]
        if lengths.is_meta:
            return Bags(self.values.data[:0], lengths)
        before = int(self.lengths[:first].sum())
        return Bags(self.values.data[before : before + int(lengths.sum())], lengths)

    def fault(self, rows: int) -> str:
        """What keeps it from being bags of so many rows; empty: nothing."""
        values, lengths = self
        if any(not isinstance(part, Tensor) or part.dtype is not torch.int64 for part in self):
            return "values and lengths that are not int64 tensors"
        if values.dim() != 1 or lengths.dim() not in (1, 2) or len(lengths) != rows:
            return f"values {tuple(values.shape)} and lengths {tuple(lengths.shape)} that are not (n,) and ({rows},)"
        if not lengths.is_meta and (lengths < 0).any():
            return "lengths below 0"
        if not lengths.is_meta and lengths.sum() != len(values):
            return f"lengths that add up to {int(lengths.sum())}, and {len(values)} values"
        return ""


_named_tuples: dict[str, type] = {f"{__name__}.Bags": Bags}
"""Classes of named tuples that data of this process consist of: what is received names one of these, or is refused."""


class MicroBatches:
    """The rows of several micro-batches, in order: a nest for each, whose shapes may differ but for the rows."""

    __slots__ = ("bounds", "parts")

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = tuple(parts)
        self.bounds = [0, *accumulate(count(part) for part in self.parts)]

    def rows(self, first: int, last: int) -> Any:
        """Rows [first, last), of one micro-batch a nest, of more than one `MicroBatches`; in their memory."""
        cut = [
            rows(part, max(first - begin, 0), min(last, end) - begin)
            for part, (begin, end) in zip(self.parts, pairwise(self.bounds), strict=True)
            if first < end and begin < last
        ]
        return cut[0] if len(cut) == 1 else MicroBatches(cut)


def map_leaves(function: Callable[[Tensor], Any], nest: Any, bags: Callable[[Bags], Any] | None = None) -> Any:
    """A nest of the same form of what `function` makes of each tensor, in the order of `leaves`.

    `bags`: what is made of Bags as a whole; None: what `function` makes of their tensors.
    """
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, dict):
        return {key: map_leaves(function, value, bags) for key, value in nest.items()}
    if isinstance(nest, MicroBatches):
        return MicroBatches([map_leaves(function, part, bags) for part in nest.parts])
    if bags is not None and isinstance(nest, Bags):
        return bags(nest)
    if isinstance(nest, list | tuple):
        return _like(nest, [map_leaves(function, value, bags) for value in nest])
    return function(nest)


def leaves(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in order."""
    if isinstance(nest, dict):
        inside: Iterable[Any] = nest.values()
    elif isinstance(nest, list | tuple):
        inside = nest
    elif isinstance(nest, MicroBatches):
        inside = nest.parts
    else:
        return [nest]
    found: list[Tensor] = []
    for value in inside:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += leaves(value)
    return found


def named(nest: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of a nest by a name that says where they are: `inputs['image'][0]`; in order."""
    return dict(_items(nest, name))


def _items(nest: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, dict):
        inside = [(f"{name}[{key!r}]", value) for key, value in nest.items()]
    elif isinstance(nest, MicroBatches):
        inside = [(f"{name} of micro-batch {number}", part) for number, part in enumerate(nest.parts)]
    elif is_named_tuple(nest):
        inside = [(f"{name}.{field}", value) for field, value in zip(nest._fields, nest, strict=True)]
    elif isinstance(nest, list | tuple):
        inside = [(f"{name}[{number}]", value) for number, value in enumerate(nest)]
    else:
        yield name, nest
        return
    for path, value in inside:
        yield from _items(value, path)


def rebuild(nest: Any, tensors: Iterable[Any]) -> Any:
    """A nest of the same form of other tensors, in the order of `leaves`."""
    given = iter(tensors)
    return map_leaves(lambda _: next(given), nest)


def count(nest: Any) -> int:
    """The number of rows."""
    while not isinstance(nest, Tensor):
        if isinstance(nest, MicroBatches):
            return nest.bounds[-1]
        if isinstance(nest, Bags):
            return len(nest.lengths)
        nest = next(iter(nest.values() if isinstance(nest, dict) else nest))
    return len(nest)


def rows(nest: Any, first: int, last: int) -> Any:
    """Rows [first, last), in their memory; each counts its own changes."""
    if isinstance(nest, MicroBatches):
        return nest.rows(first, last)
    return map_leaves(lambda tensor: tensor.data[first:last], nest, lambda bags: bags.rows(first, last))


def concatenate(nests: Sequence[Any]) -> Any:
    """The rows of nests of one form, one after the other. Shapes are equal but for the rows."""
    return rebuild(nests[0], [torch.cat(tensors) for tensors in zip(*map(leaves, nests), strict=True)])


def formats(nest: Any, rows: int) -> list[tuple[torch.Size, torch.dtype]] | None:
    """The shape of a row, and the number format, of each tensor, and of Bags the shape of a row's lengths. None where
    something is no tensor or Bags of so many rows.
    """
    found: list[Any] = []
    map_leaves(found.append, nest, found.append)
    if any(part.fault(rows) if isinstance(part, Bags) else not _has_rows(part, rows) for part in found):
        return None
    tensors = [part.lengths if isinstance(part, Bags) else part for part in found]
    return [(tensor.shape[1:], tensor.dtype) for tensor in tensors]


def bags_of(nest: Any) -> list[Bags]:
    """All Bags of a nest."""
    found: list[Bags] = []
    map_leaves(lambda tensor: tensor, nest, found.append)
    return found


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def know_classes(nest: Any) -> None:
    """Remember the named tuples of a nest, for `from_form` in this process."""
    if is_named_tuple(nest):
        _named_tuples[_class_name(type(nest))] = type(nest)
    if not isinstance(nest, Tensor):
        inside = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, list | tuple) else ()
        for value in inside:
            know_classes(value)


def form(nest: Any) -> Any:
    """What a nest is made of, as JSON: null for a tensor."""
    if isinstance(nest, Tensor):
        return None
    if isinstance(nest, dict):
        return ["dict", *([key, form(value)] for key, value in nest.items())]
    if isinstance(nest, MicroBatches):
        return [_MICRO_BATCHES, *map(form, nest.parts)]
    kind = _class_name(type(nest)) if is_named_tuple(nest) else "list" if isinstance(nest, list) else "tuple"
    return [kind, *map(form, nest)]


def from_form(described: Any, tensors: Iterator[Tensor]) -> Any:
    """The nest of a form, of so many of the tensors. ConfigError for a class that this process's data do not have."""
    if described is None:
        return next(tensors)
    kind, *inside = described
    if kind == "dict":
        return {key: from_form(value, tensors) for key, value in inside}
    values = [from_form(value, tensors) for value in inside]
    if kind in ("list", "tuple"):
        return values if kind == "list" else tuple(values)
    if kind == _MICRO_BATCHES:
        return MicroBatches(values)
    if kind not in _named_tuples:
        raise ConfigError(
            f"inputs are {kind}, which no rows of this process were; let all rows of the data be of one class, or "
            "return a dict"
        )
    return _named_tuples[kind](*values)


def _has_rows(tensor: Any, rows: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape[:1] == (rows,)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _like(nest: Any, values: list[Any]) -> Any:
    if is_named_tuple(nest):
        return type(nest)(*values)
    return values if isinstance(nest, list) else tuple(values)
