"""Rules that assign slices of parameters to servers, by name.

Torch-free, so that plugins with rules of their own may be.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping

from dtf.api.registry import bring
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

PlacementRule = Callable[[Mapping[str, list[int]], int], Mapping[str, list[int]]]
"""`rule(elements of each slice, by parameter, servers) -> server of each slice`. Slices of one parameter go to
different servers. A pure function: every process calls it for itself.
"""

_RULES: dict[str, PlacementRule] = {}


def placing(name: str) -> Callable[[PlacementRule], PlacementRule]:
    """Decorator: make a function a choice of `strategy.placement`."""

    def decorate(function: PlacementRule) -> PlacementRule:
        _RULES[name] = function
        bring(function.__module__)
        return function

    return decorate


@placing("round_robin")
def round_robin(sizes: Mapping[str, list[int]], servers: int) -> dict[str, list[int]]:
    """One server after the other, in the order of the model."""
    numbers = itertools.count()
    return {name: [next(numbers) % servers for _ in slices] for name, slices in sizes.items()}


@placing("hash_name")
def hash_name(sizes: Mapping[str, list[int]], servers: int) -> dict[str, list[int]]:
    """By CRC-32 of the parameter's name: a slice stays where it is when other parameters come and go."""
    return {
        name: [(zlib.crc32(name.encode()) + number) % servers for number, _ in enumerate(slices)]
        for name, slices in sizes.items()
    }


def check_placement(name: str) -> None:
    """Raise ConfigError for a name that is not registered."""
    if name not in _RULES:
        raise ConfigError(f"strategy.placement={name} is not registered; {suggest(name, _RULES)}")


def place_slices(name: str, sizes: Mapping[str, list[int]], servers: int) -> Mapping[str, list[int]]:
    """The server of each slice, by the rule registered as `name`. ConfigError where there is none."""
    check_placement(name)
    return _RULES[name](sizes, servers)
