"""Which tensors of a model count as one memory, and who holds a parameter that its module has no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import spectral_norm

from dtf.core.errors import ConfigError
from dtf.strategies.own_memory import Originals, refuse_shared_memory


def two() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})


def refuse(model: nn.Module, parameters_only: bool = False) -> None:
    refuse_shared_memory(model, "strategy=x", "strategy=y", parameters_only)


def test_two_parameters_of_one_memory_are_refused() -> None:
    model = two()
    model.get_parameter("b.weight").data = model.get_parameter("a.weight").data
    with pytest.raises(ConfigError, match="a.weight and b.weight share memory.*or use strategy=y"):
        refuse(model, parameters_only=True)


def test_a_buffer_or_attribute_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = two()
    model.register_buffer("alias", model.get_parameter("a.weight").detach())
    with pytest.raises(ConfigError, match="a.weight and alias share memory"):
        refuse(model)
    refuse(model, parameters_only=True)
    model = two()
    vars(model)["row"] = [model.get_parameter("b.weight")[2]]
    with pytest.raises(ConfigError, match="b.weight and row share memory"):
        refuse(model)


def test_parts_of_one_memory_without_a_common_element_are_not() -> None:
    whole, model = torch.randn(4, 12), nn.Module()
    model.rows, model.rest = nn.Parameter(whole[:1]), nn.Parameter(whole[1:, :4])
    model.columns = nn.Parameter(whole[1:, 4:])
    refuse(model)
    model.more = nn.Parameter(whole[1:, 3:5])
    with pytest.raises(ConfigError, match="rest and more"):
        refuse(model)


def test_one_parameter_of_two_modules_and_what_never_changes_are_not() -> None:
    model = two()
    model["b"].weight = model["a"].weight
    vars(model)["kept"] = [model["a"].weight]
    refuse(model)
    model.requires_grad_(False)
    vars(model)["kept"] = model.get_parameter("a.weight").data
    refuse(model)
    lstm = parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    refuse(nn.Sequential(spectral_norm(nn.Linear(4, 4)), lstm, nn.LSTM(4, 4)))


def holder(weight: Any) -> Callable[[], Any]:
    return lambda: weight


def replace(model: nn.Module) -> None:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = nn.Parameter(parameter.detach().clone()) if parameter is not None else None


def test_who_holds_a_replaced_parameter_is_named() -> None:
    model = two()
    originals = Originals(model)
    replace(model)
    originals.refuse_held(model, "strategy=x", "strategy=y")
    held = holder(model["b"].weight)
    originals = Originals(model)
    replace(model)
    with pytest.raises(ConfigError, match="b.weight is also kept in a variable of a function.*or use strategy=y"):
        originals.refuse_held(model, "strategy=x", "strategy=y")
    assert held() is not model["b"].weight


def test_a_graph_that_nobody_asks_is_no_holder() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    originals = Originals(model)
    replace(model)
    originals.refuse_held(model, "strategy=x", "strategy=y")
