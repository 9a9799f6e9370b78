"""Plain attributes of a model: what passes did to them is seen, and undone."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtf.model.attributes import GENERATOR, Attributes, digests, is_small
from dtf.model.outside_tensors import refuse_kept_copies
from dtf.strategies.own_memory import refuse_shared_memory


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.tensor = torch.zeros(3)
        self.array = np.zeros(3)
        self.items, self.last, self.names = [1, 2], deque([1], maxlen=4), {"a"}
        self.nested: dict[str, Any] = {"list": [torch.ones(2)], "object": SimpleNamespace(seen=0)}
        self.torchs, self.pythons, self.numpys = torch.Generator(), random.Random(0), np.random.default_rng(0)


CHANGES: dict[str, Callable[[Keeps], Any]] = {
    "count": lambda model: setattr(model, "count", 1),
    "tensor": lambda model: model.tensor.add_(1),
    "array": lambda model: np.add(model.array, 1, out=model.array),
    "items": lambda model: model.items.append(3),
    "last": lambda model: model.last.append(3),
    "names": lambda model: model.names.add("b"),
    "nested": lambda model: model.nested["list"][0].mul_(2),
    "torchs": lambda model: torch.rand(1, generator=model.torchs),
    "pythons": lambda model: model.pythons.random(),
    "numpys": lambda model: model.numpys.random(),
    "made": lambda model: setattr(model, "made", 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_undone(name: str) -> None:
    root = nn.Sequential(nn.Linear(2, 2), model := Keeps())
    start, kept = digests(root), Attributes(root)
    held = dict(vars(model))
    assert not kept.changed()
    CHANGES[name](model)
    assert kept.changed() == [f"1.{name}{GENERATOR * name.endswith('s') * (name not in ('items', 'names'))}"]
    kept.restore()
    assert digests(root) == start and not kept.changed()
    assert all(vars(model)[key] is value for key, value in held.items()), "the objects themselves stay"


def test_an_object_in_a_container_is_restored() -> None:
    model = Keeps()
    kept = Attributes(model)
    model.nested["object"].seen = 5
    model.nested["more"] = 1
    assert kept.changed() == ["nested"]
    kept.restore()
    assert model.nested["object"].seen == 0 and list(model.nested) == ["list", "object"]


class Steps:
    """Called, with a count."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class Slotted:
    __slots__ = ("count", "later")

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1
        self.later = self.count


def _closure() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


STEPS: dict[str, Callable[[], Any]] = {
    "called": Steps,
    "closure": _closure,
    "method": lambda: Slotted().step,
    "_calls": Steps,
}


@pytest.mark.parametrize("name", STEPS)
def test_what_can_be_called_may_keep_something(name: str) -> None:
    model = nn.Module()
    step = STEPS[name]()
    setattr(model, name, step)
    kept = Attributes(model)
    start = digests(model)
    step()
    step()
    assert kept.changed() == [name]
    kept.restore()
    assert digests(model) == start and not kept.changed()
    assert step() == 1 or name == "method"


def test_an_iterator_begins_where_it_was() -> None:
    model = nn.Module()
    model.numbers = itertools.count(3)  # type: ignore[assignment]
    kept = Attributes(model)
    assert [next(model.numbers) for _ in range(2)] == [3, 4]  # type: ignore[call-overload]
    kept.restore()
    assert next(model.numbers) == 3  # type: ignore[call-overload]


def test_a_module_that_is_none_of_the_model_is_restored() -> None:
    """Such as a teacher in a list: torch does not see it."""
    first, last = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model, teacher = nn.Linear(2, 2), nn.Sequential(first, last)
    model.others = [teacher]  # type: ignore[assignment]
    start, kept = digests(model), Attributes(model)
    weight = first.weight.detach().clone()
    teacher(torch.randn(4, 2))
    first.weight.data.add_(1)
    last.seen = torch.ones(1)
    assert kept.changed() == ["others"]
    kept.restore()
    assert digests(model) == start and torch.equal(first.weight, weight) and not hasattr(last, "seen")


class Makes(OrderedDict[str, int]):
    """Makes something anew each time that it is asked, as transformers does with activations."""

    asked = itertools.count(1)

    def __getitem__(self, key: str) -> int:
        return super().__getitem__(key) + next(self.asked)


def test_a_dict_is_compared_as_it_lies_there() -> None:
    model: Any = Keeps()
    model.nested = Makes(step=1)
    kept = Attributes(model)
    assert kept.changed() == []
    model.nested["step"] = 2
    assert kept.changed() == ["nested"]
    kept.restore()
    assert dict(model.nested.items()) == {"step": 1}


class Loads(OrderedDict[str, Any]):
    """Imports what it lists when it is asked, as transformers' MODEL_MAPPING does."""

    def asked(self, *_: Any) -> Any:
        raise ImportError("not installed")

    keys = values = items = __iter__ = __getitem__ = asked  # pyright: ignore[reportAssignmentType]


def test_a_dict_that_imports_what_it_lists_is_not_asked() -> None:
    model: Any = Keeps()
    mapping: Any = Loads()
    dict.__setitem__(mapping, "weight", nn.Parameter(torch.ones(2)))
    model.nested = mapping
    recipe = SimpleNamespace(mapping=mapping)
    kept = Attributes(model, recipe)
    dict.__setitem__(mapping, "step", 1)
    assert kept.changed() == ["nested", "recipe.mapping"]
    kept.restore()
    assert {*dict.keys(mapping)} == {"weight"}
    refuse_kept_copies([model], recipe)
    refuse_shared_memory(model, "fsdp", "ddp")
    assert is_small(mapping)
