"""What a strategy's author says of its sharding: enough, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.model.init import cast, model_of
from dtf.optim.optimizers import Sgd
from dtf.optim.sharding import Sharding, full_params
from dtf.optim.update import LocalUpdate
from dtf.strategies.replica import Replica
from dtf.strategies.spmd import Spmd
from tests.support.sparse_toy import Tabled
from tests.support.toy import Toy


def test_an_update_is_made_from_a_sharding() -> None:
    model = nn.Linear(2, 1)
    params = full_params(model, {name: p.data for name, p in model.named_parameters()})
    with pytest.raises(ConfigError, match="LocalUpdate takes a Sharding"):
        LocalUpdate(params, Sgd())  # type: ignore[arg-type]
    assert set(LocalUpdate(Sharding(params=params), Sgd()).held()) == {"weight", "bias"}


def test_a_strategy_that_makes_no_tables_refuses_a_recipe_with_some() -> None:
    task = Task(Tabled(), Sgd(), Precision(), StepOptions(), 0)
    world = World(Place())
    model = model_of(task)
    sharding = Sharding(params=full_params(model, cast(model, task.precision, torch.device("cpu"))))
    with pytest.raises(ConfigError, match="Tabled has sparse tables, and this strategy keeps none"):
        Spmd(Replica(model, task, world.device), sharding, task, world)


def test_a_model_in_place_of_a_replica_is_named() -> None:
    task = Task(Toy(), Sgd(), Precision(), StepOptions(), 0)
    model = model_of(task)
    sharding = Sharding(params=full_params(model, cast(model, task.precision, torch.device("cpu"))))
    with pytest.raises(ConfigError, match=r"Spmd got a Sequential where it takes a Replica; write Spmd\(Replica\("):
        Spmd(model, sharding, task, World(Place()))  # type: ignore[arg-type]
    replica = Replica(model, task, torch.device("cpu"))
    with pytest.raises(ConfigError, match="Spmd got a World where it takes a Task"):
        Spmd(replica, sharding, World(Place()), task)  # type: ignore[arg-type]
