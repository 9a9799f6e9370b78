"""A strategy whose `Sharding` is not that of the model is refused on all ranks before the first step: what it would
train or save would be something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dtf.core.errors import ConfigError
from dtf.core.types import Place
from dtf.distributed.sharding import Piece
from dtf.distributed.world import World
from dtf.optim.sharding import ParamShard, Sharding, full_params
from dtf.strategies.sharding_check import check_sharding
from tests.support.ranks import ranks

Change = Callable[[int, nn.Module, Sharding], Any]


def with_shard(sharding: Sharding, name: str, **fields: Any) -> Sharding:
    params = dict(sharding.params)
    return replace(sharding, params=params | {name: params[name]._replace(**fields)})


def sliced(rank: int, model: nn.Module, sharding: Sharding, wrong: int = 0, **fields: Any) -> Sharding:
    """The first layer's weight in two slices of two rows. `wrong`: by how many rows the second lies elsewhere."""
    weight: Any = model[0].weight  # type: ignore[index]
    weight.data = weight.data[2 * rank : 2 * rank + 2].contiguous()
    part = ParamShard(weight, weight.data, weight.data, (4, 3), (2 * rank - wrong * rank, 0))
    params = {name: part if name == "0.weight" else shard for name, shard in sharding.params.items()}
    if rank:
        params |= {name: shard._replace(is_primary=False) for name, shard in params.items() if name != "0.weight"}
    return Sharding(**({"params": params, "sum_slices": torch.Tensor.clone} | fields))


def pieced(rank: int, model: nn.Module, sharding: Sharding, at: int = 1) -> Sharding:
    """The same weight in rows 0 and 2, and 1 and 3. `at`: where the second piece begins in the local tensor."""
    made = sliced(rank, model, sharding)
    pieces = (Piece((0, 0), (rank, 0), (1, 3)), Piece((at, 0), (2 + rank, 0), (1, 3)))
    return with_shard(made, "0.weight", offset=(rank, 0), pieces=pieces)


def nothing() -> None:
    """Brings no parameter."""


OWNED = (frozenset({"0.weight", "0.bias"}), frozenset({"1.weight"}))
RIGHT: dict[str, Change] = {
    "rank 0 writes": lambda rank, model, s: s,
    "each owns some": lambda rank, model, s: replace(s, owned=OWNED[rank], fetch_others=nothing),
    "slices": sliced,
    "slices of several pieces": pieced,
}
WRONG: dict[str, tuple[Change, str]] = {
    "pieces over each other": (
        lambda rank, model, s: pieced(rank, model, s, at=0),
        r"has pieces that do not fill the local tensor of shape \(2, 3\) exactly once",
    ),
    "no sharding": (lambda rank, model, s: s.params, "rank 0, Spmd got a dict; make a dtf.Sharding"),
    "a flag": (
        lambda rank, model, s: replace(s, complete_gradients=True),
        "complete_gradients is True; give a function",
    ),
    "a rank for a flag": (lambda rank, model, s: replace(s, writes=1), "writes is 1; give True or False"),
    "tables that stay": (
        lambda rank, model, s: replace(s, tables=object(), steps_tables=False),
        "steps_tables is False: nothing would step the tables",
    ),
    "a list": (lambda rank, model, s: replace(s, params=list(s.params)), "params is a list; give a ParamShard by name"),
    "one missing": (
        lambda rank, model, s: replace(s, params={n: p for n, p in s.params.items() if n != "0.bias"}),
        "params lacks 0.bias",
    ),
    "one too many": (
        lambda rank, model, s: replace(s, params={**s.params, "x": s.params["0.bias"]}),
        "params has 'x', and the model has no such parameter",
    ),
    "tensors": (
        lambda rank, model, s: replace(s, params={n: p.parameter for n, p in s.params.items()}),
        r"params\['0.weight'\] is a tensor of shape \(4, 3\); give a ParamShard",
    ),
    "another model": (
        lambda rank, model, s: replace(s, params=full_params(other := make(), masters(other))),
        "another tensor than the model",
    ),
    "another memory": (
        lambda rank, model, s: with_shard(s, "0.bias", local=torch.zeros(4)),
        "what is stepped would not be what computes",
    ),
    "a master of a slice": (
        lambda rank, model, s: with_shard(s, "0.bias", master=torch.zeros(2)),
        r"master of shape \(2,\) for a local tensor of \(4,\)",
    ),
    "no master": (
        lambda rank, model, s: with_shard(s, "0.bias", master=None),
        r"params\['0.bias'\] has None as its master; give a tensor",
    ),
    "a master of whole numbers": (
        lambda rank, model, s: with_shard(s, "0.bias", master=torch.zeros(4, dtype=torch.int64)),
        "has a master of torch.int64 on cpu for a local tensor of torch.float32 on cpu",
    ),
    "a master that two have": (
        lambda rank, model, s: with_shard(s, "0.bias", master=s.params["0.weight"].local.view(-1)[2:6]),
        r"params\['0.bias'\] has a master in the memory of 0.weight",
    ),
    "no place": (lambda rank, model, s: with_shard(s, "0.bias", offset=None), "has offset=None; give a tuple of int"),
    "a place between rows": (
        lambda rank, model, s: with_shard(s, "0.bias", offset=(0.0,)),
        r"has offset=\(0.0,\); give a tuple of int",
    ),
    "a shape of text": (lambda rank, model, s: with_shard(s, "0.bias", shape="4"), "has shape='4'; give a tuple"),
    "a number for a flag": (
        lambda rank, model, s: with_shard(s, "0.bias", is_primary=1),
        "has is_primary=1; give True or False",
    ),
    "other tables": (lambda rank, model, s: replace(s, tables={}), "tables is a dict; give a ShardedTables, or None"),
    "a device for a tensor": (
        lambda rank, model, s: replace(s, like=torch.device("cpu")),
        "like is a device; give a Tensor, or None",
    ),
    "outside": (lambda rank, model, s: with_shard(s, "0.bias", offset=(1,)), r"\(4,\) at offset \(1,\) is a part of"),
    "before the start": (lambda rank, model, s: with_shard(s, "0.bias", offset=(-1,)), "does not lie in it"),
    "norms of slices": (lambda rank, model, s: sliced(rank, model, s, sum_slices=None), "sum_slices is None"),
    "slices that overlap": (
        lambda rank, model, s: sliced(rank, model, s, wrong=1),
        "the parts of 0.weight, .* ranks 0, 1 .* exactly once: .*overlaps",
    ),
    "one order and another": (
        lambda rank, model, s: replace(s, params=dict(sorted(s.params.items()))),
        "params has another order than the model",
    ),
    "nobody writes": (lambda rank, model, s: replace(s, writes=False), "no rank writes 0.weight to checkpoints"),
    "nobody is first": (
        lambda rank, model, s: with_shard(s, "0.bias", is_primary=False),
        "no rank writes 0.bias to checkpoints",
    ),
    "all write": (lambda rank, model, s: replace(s, writes=True), "ranks 0 and 1 both write 0.weight .* writes=False"),
    "all own": (
        lambda rank, model, s: replace(s, owned=OWNED[0] | OWNED[1]),
        "ranks 0 and 1 both write 0.weight",
    ),
    "a name for names": (lambda rank, model, s: replace(s, owned="0.weight"), "owned is '0.weight'; give a frozenset"),
    "an unknown one is owned": (
        lambda rank, model, s: replace(s, owned=frozenset({"2.weight"})),
        "owned has '2.weight', which is no parameter that is trained",
    ),
    "a frozen one is owned": (
        lambda rank, model, s: replace(s, owned=frozenset({"1.bias"})),
        "owned has '1.bias', which is no parameter that is trained",
    ),
    "nobody brings others": (
        lambda rank, model, s: replace(s, owned=OWNED[rank]),
        "fetch_others is None: nothing would bring them up to date",
    ),
    "one has no owner": (
        lambda rank, model, s: replace(s, owned=OWNED[0] if rank == 0 else frozenset(), fetch_others=nothing),
        "no rank owns 1.weight",
    ),
    "only the other rank is wrong": (
        lambda rank, model, s: replace(s, writes=1) if rank else s,
        "on rank 1, writes is 1",
    ),
    "other models": (
        lambda rank, model, s: replace(s, params=full_params(grown(model), masters(model))) if rank else s,
        "rank 0 has 1.weight of shape .* where rank 1 has 1.weight of shape",
    ),
}


def make() -> nn.Sequential:
    """The bias of the last layer is frozen."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    return model


def grown(model: nn.Module) -> nn.Module:
    """The same model with more outputs."""
    model[1].weight.data = torch.zeros(5, 4)  # type: ignore[index,union-attr]
    return model


def masters(model: nn.Module) -> dict[str, Any]:
    return {name: p.data for name, p in model.named_parameters()}


def outcomes(rank: int, size: int) -> list[str]:
    """What the check says of each case on this rank; "" for nothing."""
    world = World(Place(rank=rank, size=size))
    said = []
    for change in [*RIGHT.values(), *(change for change, _ in WRONG.values())]:
        model = make()
        sharding = Sharding(params=full_params(model, masters(model)), writes=rank == 0)
        try:
            check_sharding(change(rank, model, sharding), model, world)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def said() -> list[list[str]]:
    return ranks(2, "tests.laws.test_sharding_check:outcomes", shared=True)


def test_all_ranks_say_the_same(said: list[list[str]]) -> None:
    assert said[0] == said[1]


@pytest.mark.parametrize("case", RIGHT)
def test_a_sharding_of_the_model_is_taken(case: str, said: list[list[str]]) -> None:
    assert said[0][list(RIGHT).index(case)] == ""


@pytest.mark.parametrize("case", WRONG)
def test_another_is_refused_by_name(case: str, said: list[list[str]]) -> None:
    message = said[0][len(RIGHT) + list(WRONG).index(case)]
    assert message.startswith("the strategy's Sharding: ")
    assert re.search(WRONG[case][1], message), message
