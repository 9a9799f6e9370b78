"""Plain numbers that every pass of a model changes, such as a count of passes, moved ahead to see what comes later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from dtf.model.attributes import plain_attributes


class _Place(NamedTuple):
    holder: dict[str, Any]  # the attributes of a module, or a dict among them
    key: str


class Counters:
    """The plain numbers of a model's modules, and of dicts in their attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[str, list[float]] = {}
        self._places: dict[str, _Place] = {}

    def note(self) -> None:
        """Called after each of several passes."""
        for name, place in _numbers(self._model):
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
        places = [(self._places[name], self._values[name]) for name in self.names()]
        before = [place.holder[place.key] for place, _ in places]
        for (place, values), value in zip(places, before, strict=True):
            place.holder[place.key] = value + passes * (values[-1] - values[-2])
        try:
            yield
        finally:
            for (place, _), value in zip(places, before, strict=True):
                place.holder[place.key] = value


def _numbers(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    for name, holder, key, value in plain_attributes(model):
        if type(value) in (int, float):
            yield name, _Place(holder, key)
        elif type(value) is dict:
            for inner, number in value.items():
                if type(number) in (int, float):
                    yield f"{name}[{inner!r}]", _Place(value, inner)
