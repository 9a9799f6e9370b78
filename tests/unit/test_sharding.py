"""What a strategy's author says of its sharding: enough, or refused by name."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Place
from dtf.distributed.sharding import cut
from dtf.distributed.world import World
from dtf.model.init import cast, model_of
from dtf.optim.optimizers import AdamW, Sgd
from dtf.optim.sharding import ParamShard, Sharding, full_params
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


@pytest.mark.parametrize("ranges", [[(0, 2), (4, 6), (6, 7)], [(3, 3), (5, 8)], [(2, 2)], [(0, 8)]])
def test_a_slice_takes_its_ranges_and_a_part_of_it_rows_of_these(ranges: list[tuple[int, int]]) -> None:
    """A cut of a cut, as where a further axis of a mesh cuts again, is that part of the first one."""
    full = torch.arange(24).view(8, 3)
    for axis, tensor in ((0, full), (1, full.t().contiguous())):
        here = torch.cat([tensor.narrow(axis, first, last - first) for first, last in ranges], axis)
        part = cut(tensor.shape, axis, ranges)
        assert torch.equal(part.take(tensor), here)
        assert [piece for piece in part.pieces if 0 in piece.shape] == (list(part.pieces) if not here.numel() else [])
        for first in range(here.shape[axis] + 1):
            for last in range(first, here.shape[axis] + 1):
                again = part.narrow(axis, first, last)
                assert torch.equal(again.take(tensor), here.narrow(axis, first, last - first))


def test_an_update_writes_and_reads_the_pieces_of_a_parameter() -> None:
    """A checkpoint has each piece at its own place, of the optimizer's state too, and its counter once."""
    full, boxes, updates = torch.arange(18.0).view(6, 3), [], []
    for ranges in ([(0, 1), (3, 5)], [(1, 3), (5, 6)]):
        part = cut(full.shape, 0, ranges)
        parameter = nn.Parameter(part.take(full))
        data = parameter.data
        shard = ParamShard(parameter, data, data, part.shape, part.pieces[0].offset, True, part.pieces)
        update = LocalUpdate(Sharding(params={"w": shard}, sum_slices=torch.Tensor.clone), AdamW())
        parameter.grad = torch.ones_like(parameter) * part.take(full)
        update.apply(0, 0.1)
        boxes += update.state().boxes
        updates.append((update, data, data.clone()))
        assert list(update.held()) == [f"w at {[[first, 0] for first, _ in ranges]}"]
    assert [box.name for box in boxes if not box.shape] == ["optimizer/w/step"]
    stored = {}
    for box in boxes:
        where = tuple(slice(at, at + n) for at, n in zip(box.offset, box.tensor.shape, strict=True))
        stored.setdefault(box.name, torch.full(box.shape, torch.nan))[where] = box.tensor
    assert not any(tensor.isnan().any() for tensor in stored.values())
    for update, data, before in updates:
        moments = update.kept("w")["mean"].clone()
        data.zero_()
        update.kept("w")["mean"].zero_()
        update.load(InMemory(stored))
        assert torch.equal(data, before)
        assert torch.equal(update.kept("w")["mean"], moments)


class InMemory:
    """A checkpoint that is no file."""

    scalars: ClassVar[dict[str, int]] = {}

    def __init__(self, stored: dict[str, Tensor]) -> None:
        self._stored = stored

    def read_into(self, name: str, out: Tensor, offset: tuple[int, ...] = (), whole: tuple[int, ...] = ()) -> None:
        assert tuple(self._stored[name].shape) == whole
        out.copy_(self._stored[name][tuple(slice(at, at + n) for at, n in zip(offset, out.shape, strict=True))])
