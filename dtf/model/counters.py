"""Plain numbers that every pass of a model changes, such as a count of passes, moved ahead to see what comes later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from dtf.model.attributes import DEPTH, has_fields, plain_attributes

MOST_INSIDE = 100
"""Items of a dict, list or object in which numbers are looked for: a longer one is data."""


class _Place(NamedTuple):
    holder: Any  # the attributes of a module or an object, a dict or a list
    key: Any


class Counters:
    """The plain numbers of a model's modules and of its recipe, and of dicts, lists and objects in their attributes."""

    def __init__(self, model: nn.Module, recipe: object = None) -> None:
        self._model, self._recipe = model, recipe
        self._values: dict[str, list[float]] = {}
        self._places: dict[str, _Place] = {}

    def note(self) -> None:
        """Called after each of several passes."""
        for name, place in _numbers(self._model, self._recipe):
            self._places[name] = place
            self._values.setdefault(name, []).append(place.holder[place.key])

    def names(self) -> list[str]:
        """Of the numbers that all passes have changed."""
        most = max(map(len, self._values.values()), default=0)
        return [
            name
            for name, values in self._values.items()
            if len(values) == most and all(one != two for one, two in pairwise(values))
        ]

    @contextmanager
    def ahead(self, passes: int) -> Iterator[None]:
        """A context in which these numbers are what they would be after so many more passes, if they went on so."""
        places = [(self._places[name], self._values[name]) for name in self.names() if _there(self._places[name])]
        before = [place.holder[place.key] for place, _ in places]
        for (place, values), value in zip(places, before, strict=True):
            place.holder[place.key] = value + passes * (values[-1] - values[-2])
        try:
            yield
        finally:
            for (place, _), value in zip(places, before, strict=True):
                place.holder[place.key] = value


def _there(place: _Place) -> bool:
    """Whether the last pass has left it: a list may have lost it since."""
    return place.key in place.holder if isinstance(place.holder, dict) else place.key < len(place.holder)


def _numbers(model: nn.Module, recipe: object) -> Iterator[tuple[str, _Place]]:
    seen = {id(module) for module in model.modules()}
    for name, holder, key, value in plain_attributes(model, recipe):
        yield from _inside(name, holder, key, value, seen, DEPTH)


def _inside(
    name: str, holder: dict[Any, Any] | list[Any], key: Any, value: Any, seen: set[int], depth: int
) -> Iterator[tuple[str, _Place]]:
    """The number that this value is, or those in it."""
    if type(value) in (int, float):
        yield name, _Place(holder, key)
        return
    inner: dict[Any, Any] | list[Any] = {}
    if type(value) in (dict, list):
        inner, form = value, "[{!r}]"
    elif has_fields(value):
        inner, form = vars(value), ".{}"
    if not inner or depth == 0 or id(value) in seen or len(inner) > MOST_INSIDE:
        return
    seen.add(id(value))
    for at, item in list(inner.items() if isinstance(inner, dict) else enumerate(inner)):
        yield from _inside(name + form.format(at), inner, at, item, seen, depth - 1)
