"""Plain numbers that every pass changes are found wherever a model keeps them, and moved ahead for a while."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtf.model.counters import MOST_CONSTANTS, Counters, Move


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.still = 0, 3
        self.table = {"seen": 0.0}
        self.items = [0, 7]
        self.rows, self.seen = np.int64(0), torch.zeros((), dtype=torch.int64)
        self.mean = torch.zeros(1)
        self.state: Any = SimpleNamespace(step=0, inner=SimpleNamespace(step=0))
        self.state.owner = self.state  # objects may hold each other
        self.data = list(range(1000))


def _step(model: Keeps) -> None:
    model.calls += 2
    model.table["seen"] += 0.5
    model.items[0] += 1
    model.rows += 1
    model.seen += 1
    model.mean += 0.5
    model.state.step += 1
    model.state.inner.step -= 1
    model.data[0] += 1


FOUND: dict[str, tuple[Callable[[Keeps], float], float]] = {
    "1.calls": (lambda model: model.calls, 6 + 20),
    "1.table['seen']": (lambda model: model.table["seen"], 1.5 + 5),
    "1.items[0]": (lambda model: model.items[0], 3 + 10),
    "1.rows": (lambda model: int(model.rows), 3 + 10),
    "1.seen": (lambda model: model.seen.item(), 3 + 10),
    "1.mean": (lambda model: model.mean.item(), 1.5 + 5),
    "1.state.step": (lambda model: model.state.step, 3 + 10),
    "1.state.inner.step": (lambda model: model.state.inner.step, -3 - 10),
}


def counted(model: Keeps, passes: int = 3) -> Counters:
    counters = Counters(nn.Sequential(nn.Linear(2, 2), model))
    for _ in range(passes):
        _step(model)
        counters.note()
    return counters


def test_numbers_that_all_passes_change_are_named() -> None:
    assert sorted(counted(Keeps()).names()) == sorted(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_they_are_moved_ahead_and_back(name: str) -> None:
    read, ahead = FOUND[name]
    counters = counted(model := Keeps())
    before = read(model)
    with counters.moved(Move(10)):
        assert read(model) == ahead
    assert read(model) == before


def test_what_a_list_has_lost_is_left_out() -> None:
    counters = counted(model := Keeps())
    model.items.clear()
    with counters.moved(Move(10)):
        assert model.items == [] and model.calls == 26
    assert model.items == []


class Compares(nn.Module):
    """Compares its counts with numbers in its code and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.part, self.log, self.until = 0, 1.0, list[int](), 70

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.part *= 0.5
        self.log.append(1)
        return x * 2 if self.passes == 41 or any(self.passes == 1000 + i for i in range(3)) else x


def compared() -> tuple[Counters, Compares]:
    model = Compares()
    counters = Counters(model)
    for _ in range(3):
        model(torch.zeros(1))
        counters.note()
    return counters, model


def test_what_shrinks_by_a_factor_goes_on_so() -> None:
    counters, model = compared()
    with counters.moved(Move(10)):
        assert model.part == pytest.approx(0.5**13)
    assert model.part == 0.5**3


def test_a_list_that_grows_goes_on_so() -> None:
    counters, model = compared()
    with counters.moved(Move(10)):
        assert model.log == [1] * 13
    with counters.moved(Move(1_000_000)):
        assert len(model.log) == 10_000
    assert model.log == [1] * 3


def test_counts_are_tried_at_numbers_of_the_code_and_of_attributes() -> None:
    counters, model = compared()
    assert {3, 41, 70, 1000} <= set(counters.constants())
    with counters.moved(Move(value=41)):
        assert model.passes == 41
    assert model.passes == 3
    assert len(counters.constants()) <= MOST_CONSTANTS


def test_a_model_that_counts_nothing_is_tried_nowhere() -> None:
    counters = Counters(Compares())
    counters.note()
    counters.note()
    assert counters.constants() == []
