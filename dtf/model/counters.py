"""Plain numbers that every pass of a model changes, such as a count of passes, moved ahead to see what comes later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dtf.model.attributes import DEPTH, holders, plain_attributes
from dtf.model.object_fields import fields_of, has_fields, set_fields
from dtf.model.shared_state import shared_holders, shared_values

MOST_INSIDE = 100
"""Items of a dict, list or object in which numbers are looked for: a longer one is data."""


MULTIPLE = 720_720_000
"""A number of passes that 1 to 16, 100, 500, 1,000 and 10,000 divide: what comes every so many passes comes then."""


MOST_CONSTANTS = 16
"""Whole numbers in the code and attributes of a model that counts are tried at."""
_LONGEST = 10_000
"""A list that every pass makes longer is not made longer than this."""


class Move(NamedTuple):
    """Where counters are moved: by so many passes, or to a value."""

    passes: int = 0
    value: int | None = None


class _Place(NamedTuple):
    holder: Any  # the attributes of a module, a dict, a list, or an object with fields
    key: Any

    def there(self) -> bool:
        """Whether the last pass has left it: a list may have lost it since."""
        holder = self.holder
        return self.key < len(holder) if isinstance(holder, list) else self.key in _items(holder)

    def read(self) -> Any:
        """A number. Waits for the device where it is a tensor."""
        value = _items(self.holder)[self.key]
        return value.item() if isinstance(value, Tensor) else value

    def write(self, value: Any) -> None:
        there = _items(self.holder)[self.key]
        if isinstance(there, Tensor):
            with torch.no_grad():
                there.fill_(value)
        elif isinstance(self.holder, dict | list):
            self.holder[self.key] = value
        elif isinstance(self.holder, type | ModuleType):
            setattr(self.holder, self.key, value)
        else:
            set_fields(self.holder, {**fields_of(self.holder), self.key: value})


class _Length(NamedTuple):
    """The number of items of a list."""

    items: list[Any]

    def there(self) -> bool:
        return bool(self.items)

    def read(self) -> int:
        return len(self.items)

    def write(self, value: Any) -> None:
        length = max(0, min(int(value), _LONGEST))
        self.items[length:] = self.items[-1:] * (length - len(self.items))


class Counters:
    """The plain numbers of a model's modules and of its recipe, of their classes and Python modules, and of containers
    and objects in their attributes.
    """

    def __init__(self, model: nn.Module, recipe: object = None) -> None:
        self._model, self._recipe = model, recipe
        self._values: dict[str, list[float]] = {}
        self._places: dict[str, _Place | _Length] = {}

    def note(self) -> None:
        """Called after each of several passes."""
        for name, place in _numbers(self._model, self._recipe):
            self._places[name] = place
            self._values.setdefault(name, []).append(place.read())

    def names(self) -> list[str]:
        """Of the numbers that all passes have changed."""
        most = max(map(len, self._values.values()), default=0)
        return [
            name
            for name, values in self._values.items()
            if len(values) == most and all(one != two for one, two in pairwise(values))
        ]

    def constants(self) -> list[int]:
        """Whole numbers that these counters may be compared with: those in the code of the model's classes and its
        recipe's, and in the attributes of such modules.
        """
        if not self.names():
            return []
        kinds = {kind for _, kind in shared_holders(self._model, self._recipe) if isinstance(kind, type)}
        found = [number for kind in kinds for function in _functions(kind) for number in _constants(function.__code__)]
        own = [holder for _, holder in holders(self._model, self._recipe) if type(holder) in kinds]
        found += [value for holder in own for value in vars(holder).values() if type(value) is int]
        return sorted({number for number in found if 1 < number < MULTIPLE})[:MOST_CONSTANTS]

    @contextmanager
    def moved(self, move: Move) -> Iterator[None]:
        """A context in which these numbers are what they would be after so many more passes, if they went on so; whole
        numbers from MULTIPLE - 1 passes on what they would be after so many passes in all. Or all have one value.
        """
        places = [(self._places[name], self._values[name]) for name in self.names() if self._places[name].there()]
        before = [place.read() for place, _ in places]
        for (place, values), value in zip(places, before, strict=True):
            place.write(_after(values, value, move.passes) if move.value is None else move.value)
        try:
            yield
        finally:
            for (place, _), value in zip(places, before, strict=True):
                place.write(value)


def _after(values: Sequence[float], value: Any, passes: int) -> Any:
    """What a number comes to after so many more passes. `values`: after those so far; a number that grows or shrinks by
    a factor goes on so.
    """
    if len(values) > 2 and isinstance(value, float) and all(values):
        last, before = values[-1] / values[-2], values[-2] / values[-3]
        if math.isclose(last, before, rel_tol=1e-6) and not math.isclose(last, 1.0):
            with suppress(OverflowError):
                return value * last**passes
            return math.inf
    in_all = passes >= MULTIPLE - 1 and isinstance(value, int | np.integer)
    return passes * (values[-1] - values[-2]) + (0 if in_all else value)


def _functions(kind: type) -> Iterator[FunctionType]:
    return (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _constants(code: CodeType) -> Iterator[int]:
    """The whole numbers in a function's code, and in functions inside it."""
    for constant in code.co_consts:
        if type(constant) is int:
            yield constant
        elif isinstance(constant, CodeType):
            yield from _constants(constant)


def _is_number(value: Any) -> bool:
    """Whether it is a tensor that counts: one number, which nothing learns."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return plain and value.numel() == 1 and not value.is_complex() and not value.requires_grad


def _items(holder: Any) -> Any:
    if isinstance(holder, type | ModuleType):
        return vars(holder)
    return holder if isinstance(holder, dict | list) else fields_of(holder)


def _numbers(model: nn.Module, recipe: object) -> Iterator[tuple[str, _Place | _Length]]:
    seen = {id(module) for module in model.modules()}
    for name, holder, key, value in plain_attributes(model, recipe):
        yield from _inside(name, holder, key, value, seen, DEPTH)
    for name, holder in shared_holders(model, recipe):
        for key, value in shared_values(holder):
            yield from _inside(f"{name}.{key}", holder, key, value, seen, DEPTH)


def _inside(
    name: str, holder: Any, key: Any, value: Any, seen: set[int], depth: int
) -> Iterator[tuple[str, _Place | _Length]]:
    """The number that this value is, or those in it."""
    if type(value) in (int, float) or isinstance(value, np.number) or _is_number(value):
        yield name, _Place(holder, key)
        return
    if type(value) in (dict, list):
        inner, form = value, "[{!r}]"
    elif has_fields(value):
        inner, form = fields_of(value), ".{}"
    else:
        return
    if depth == 0 or id(value) in seen or len(inner) > MOST_INSIDE:
        return
    seen.add(id(value))
    if type(value) is list:
        yield f"the length of {name}", _Length(value)
    for at, item in list(dict.items(inner) if isinstance(inner, dict) else enumerate(inner)):
        yield from _inside(name + form.format(at), value, at, item, seen, depth - 1)
