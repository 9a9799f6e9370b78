"""What copies of a model in one process share is seen to change: classes, Python modules and the recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from dtf.model.shared_state import SharedState

_LAST: Any = None
_SEEN = {"rows": np.zeros(2)}


class Shares(nn.Module):
    last: Any = None
    names: ClassVar[list[str]] = []


class Recipe:
    def __init__(self) -> None:
        self.kept: Any = torch.zeros(2)


CHANGES: dict[str, Callable[[Recipe], Any]] = {
    "Shares.names": lambda recipe: Shares.names.append("a"),
    "Shares.last": lambda recipe: setattr(Shares, "last", torch.zeros(2)),
    "test_shared_state._LAST": lambda recipe: globals().update(_LAST=3),
    "test_shared_state._SEEN": lambda recipe: _SEEN["rows"].__iadd__(1),
    "the recipe.kept": lambda recipe: recipe.kept.add_(1),
    "the recipe.made": lambda recipe: setattr(recipe, "made", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_shared_is_seen_to_change(name: str) -> None:
    recipe = Recipe()
    kept = SharedState(nn.Sequential(Shares(), nn.Linear(2, 2)), recipe)
    assert not kept.changed()
    CHANGES[name](recipe)
    (changed,) = kept.changed()
    assert changed.endswith(name)


def test_what_a_module_keeps_is_its_own() -> None:
    model = Shares()
    kept = SharedState(model, Recipe())
    model.count = torch.ones(1)
    assert not kept.changed()


class Remembers(nn.Module):
    last: Any = None
    counts: ClassVar[dict[str, int]] = {"passes": 0}

    @staticmethod
    @functools.cache
    def mask(width: int) -> torch.Tensor:
        return torch.ones(width)

    def forward(self, x: torch.Tensor, seen: list[float] = []) -> torch.Tensor:  # noqa: B006
        global _LAST
        seen.append(float(x.sum()))
        _LAST = x
        Remembers.last, Remembers.made = x, 1  # type: ignore[attr-defined]
        self.counts["passes"] += 1
        _SEEN["rows"] += 1
        return x * self.mask(2) * len(seen)


def test_what_a_pass_left_in_shared_places_is_taken_back() -> None:
    model = Remembers()
    kept = SharedState(model, Recipe())
    first = model(torch.ones(2))
    assert Remembers.mask.cache_info().currsize == 1 and len(kept.changed()) == 5
    kept.restore()
    assert not kept.changed() and Remembers.last is None and not hasattr(Remembers, "made")
    assert Remembers.counts == {"passes": 0} and Remembers.mask.cache_info().currsize == 0
    assert torch.equal(model(torch.ones(2)), first)  # the default of the argument too
    kept.restore()
