"""Costs of blocks: what is counted equals what is measured, and neither touches the model or the generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.init import construct
from dtf.strategies.pipeline.cost_model import count, measure
from dtf.strategies.pipeline.graph_split import GraphSplit
from dtf.strategies.pipeline.partition import Cost, partition
from tests.unit.test_graph_split import Resnet


def state_bytes(block: nn.Module, name: str) -> int:
    return sum(p.numel() * 16 for p in block.parameters())


class Wide(nn.Module):
    """Layers of unequal work, and a value that goes past two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.d(torch.relu(self.c(torch.relu(self.b(x))))) + x


class Words(nn.Module):
    """Integers in, two inputs by name."""

    order: Tensor

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(50, 8), nn.Linear(8, 2)
        self.register_buffer("order", torch.arange(3))
        self._between = between

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids = self.table(inputs["ids"].index_select(1, self.order))
        size = ids.size(0)
        out = self.top(ids.mean(1)) + inputs["offset"]
        return out.view(size, -1) if self._between else out


WORDS = {"ids": torch.full((4, 3), 49), "offset": torch.zeros(4, 2)}
WIDE = [["a"], ["b"], ["c"], ["d"]]


def wide() -> GraphSplit:
    with torch.device("meta"):
        return GraphSplit(Wide(), WIDE)


def sizes(costs: list[Cost]) -> list[tuple[int, int, int]]:
    return [(cost.state_bytes, cost.activation_bytes, cost.boundary_bytes) for cost in costs]


def test_operations_and_bytes_are_those_on_paper() -> None:
    """A Linear of n inputs and m outputs for B rows takes 2 B n m operations forward and as many for each gradient that
    is needed.
    """
    rows = 32
    found = count(wide(), torch.empty(rows, 64), state_bytes)
    macs = [(64, 64, 2), (64, 512, 3), (512, 512, 3), (512, 64, 3)]
    assert [cost.work for cost in found] == [2 * rows * n * m * passes for n, m, passes in macs]
    assert [cost.activation_bytes for cost in found] == [4 * rows * width for width in (64, 512, 512, 2 * 64 - 64)]
    assert [cost.boundary_bytes for cost in found] == [4 * rows * width for width in (64, 64 + 512, 64 + 512, 0)]
    assert found[2].state_bytes == 16 * (512 * 512 + 512)


@pytest.mark.parametrize(("fine", "autocast"), [(False, None), (True, torch.bfloat16)])
def test_counting_finds_the_bytes_that_measuring_finds(fine: bool, autocast: torch.dtype | None) -> None:
    recipe = Resnet("resnet8")
    model = construct(recipe)
    split, sample = GraphSplit(model, recipe.layout(model).blocks, fine), torch.randn(4, 3, 16, 16)
    counted, measured = (
        sizes(count(split, sample, state_bytes, autocast)),
        sizes(measure(split, sample, state_bytes, autocast, seconds=0)),
    )
    for one, other in zip(counted, measured, strict=True):
        # in bf16, shape functions and kernels save a norm's statistics in different formats
        assert one == pytest.approx(other, rel=1e-2)


def test_half_precision_halves_what_is_sent() -> None:
    sample = torch.empty(32, 64)
    full, half = count(wide(), sample, state_bytes), count(wide(), sample, state_bytes, torch.bfloat16)
    assert half[1].boundary_bytes < full[1].boundary_bytes and half[1].state_bytes == full[1].state_bytes


@pytest.mark.parametrize("look", [measure, count])
def test_nothing_is_left_behind(look: Any) -> None:
    split = wide()
    model = split._model
    model.eval()
    before = torch.get_rng_state()
    look(split, torch.zeros(2, 64), state_bytes)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert torch.get_rng_state().equal(before) and not any(module.training for module in model.modules())


def test_more_work_takes_more_time() -> None:
    works = [cost.work for cost in measure(wide(), torch.randn(256, 64), state_bytes, seconds=0.1)]
    assert works[2] > works[0] > 0


@pytest.mark.parametrize("look", [measure, count])
def test_integers_and_inputs_by_name(look: Any) -> None:
    """Embedding ids need no gradient; one input goes on to the second block."""
    with torch.device("meta"):
        split = GraphSplit(Words(between=False), [["table"], ["top"]])
    found = look(split, WORDS, state_bytes)
    assert [cost.name for cost in found] == ["table", "top"]
    assert found[0].boundary_bytes == 4 * 4 * 8 + 4 * 4 * 2


@pytest.mark.parametrize("look", [measure, count])
def test_only_tensors_cross_cuts(look: Any) -> None:
    split = GraphSplit(Words(between=True), [["table"], ["top"]])
    costs = look(split, WORDS, state_bytes)
    why = "cannot be cut after block table: only tensors can be sent on, and what is used after it has int"
    assert why in costs[0].uncut
    with pytest.raises(ConfigError, match=why):
        partition(costs, 2, [1, 1])
    assert partition([*costs, costs[1]], 2, [1, 1]) == [0, 2, 3]


class Eager(nn.Module):
    """A block that changes its input in place, which a received tensor must not suffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


def test_a_block_that_cannot_run_by_itself_is_named() -> None:
    split = GraphSplit(nn.Sequential(nn.Linear(3, 3), Eager()), [["0"], ["1"]])
    with pytest.raises(ConfigError, match="block 1 does not run by itself on cpu: a leaf Variable"):
        measure(split, torch.zeros(2, 3), state_bytes)


def test_prepare_makes_the_block_what_a_run_makes_it() -> None:
    found = measure(
        wide(),
        torch.zeros(2, 64, dtype=torch.float64),
        state_bytes,
        prepare=lambda block: block.to(torch.float64) and None,
        seconds=0,
    )
    assert found[0].boundary_bytes == 2 * 64 * 8
