"""Tensors that a loss comes to past the model that computes its rows are found, and called a copy where they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.outside_tensors import OutsideTensors, refuse_kept_copies, refuse_reached

_KEPT: list[nn.Module] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Recipe:
    model: nn.Module | None = None


def found(loss: Callable[[Layer], Tensor]) -> list[str]:
    """What two passes of a model and this loss come to."""
    outside = OutsideTensors(model := Layer(), Recipe())
    for _ in range(2):
        outside.look(loss(model))
    return outside.learning()


def test_a_leaf_that_was_there_before_is_found() -> None:
    scale = torch.ones((), requires_grad=True)
    assert found(lambda model: (model(torch.ones(3)) * scale).sum()) == ["a tensor of shape ()"]


def test_a_copy_is_said_to_be_one() -> None:
    other = Layer()
    named = found(lambda model: model(torch.ones(3)).sum() + other.weight.sum())
    assert named == ["a copy of the parameter weight"]


def test_leaves_that_a_pass_makes_are_its_own() -> None:
    assert found(lambda model: model(torch.ones(3, requires_grad=True)).sum()) == []


def test_what_has_no_gradient_may_be_reached() -> None:
    teacher = Layer().requires_grad_(False)
    assert found(lambda model: (model(torch.ones(3)) - teacher(torch.ones(3))).sum()) == []


def test_the_recipe_may_keep_the_one_model_of_a_process() -> None:
    recipe = Recipe()
    recipe.model = Layer()
    refuse_kept_copies([recipe.model], recipe)
    with pytest.raises(ConfigError, match=r"a copy of the model \(recipe.model\)"):
        refuse_kept_copies([recipe.model, copy.deepcopy(recipe.model)], recipe)
    with pytest.raises(ConfigError, match=r"recipe.model"):
        refuse_kept_copies([copy.deepcopy(recipe.model)], recipe)


def test_a_container_of_the_file_is_looked_into() -> None:
    model = Layer()
    _KEPT[:] = [Layer()]
    try:
        with pytest.raises(ConfigError, match=r"test_outside_tensors._KEPT"):
            refuse_kept_copies([model], Recipe())
    finally:
        _KEPT.clear()


def test_a_teacher_is_no_copy() -> None:
    recipe = Recipe()
    recipe.model = Layer()
    with torch.no_grad():
        recipe.model.weight.add_(1)
    refuse_kept_copies([Layer()], recipe)  # other numbers
    recipe.model = Layer().requires_grad_(False)
    refuse_kept_copies([Layer()], recipe)  # it does not learn


def test_a_gradient_in_another_replica_is_refused() -> None:
    first = Layer()
    refuse_reached(first)
    first(torch.ones(3)).sum().backward()
    with pytest.raises(ConfigError, match="a copy of the parameter weight"):
        refuse_reached(first)
