"""How many bytes of a model last between steps."""

from __future__ import annotations

import pytest
from torch import nn

from dtf.api.layout import Split, SplitBy
from dtf.api.precision import Precision
from dtf.optim.optimizers import Sgd
from dtf.optim.state_bytes import StateSlices, state_bytes
from dtf.strategies.tensor_parallel.divide import largest_shares

WEIGHT, BIAS = 12 * 8, 12


@pytest.mark.parametrize(
    ("slices", "numbers"),
    [
        (StateSlices(), 3 * (WEIGHT + BIAS)),
        (StateSlices(2, 1), 3.5 * (WEIGHT + BIAS)),
        (StateSlices(2, 2), 2.5 * (WEIGHT + BIAS)),
        (StateSlices(2, 3), 1.5 * (WEIGHT + BIAS)),
        (StateSlices(layers=(("0", 0.5),)), 1.5 * (WEIGHT + BIAS)),
        (StateSlices(2, 3, (("0", 0.5),)), 0.75 * (WEIGHT + BIAS)),
        (StateSlices(layers=(("1", 0.5),)), 3 * (WEIGHT + BIAS)),
    ],
)
def test_parameter_gradient_and_momentum(slices: StateSlices, numbers: float) -> None:
    assert state_bytes(nn.Sequential(nn.Linear(8, 12)), Sgd(momentum=0.9), Precision(), slices) == 4 * numbers


def test_a_parameter_by_itself_is_known_by_its_name_in_the_model() -> None:
    slices = StateSlices(layers=(("0", 0.5),))
    assert state_bytes(nn.Linear(8, 12, bias=False), Sgd(momentum=0.9), Precision(), slices, "0.weight") == 6 * WEIGHT


def test_the_largest_share_of_uneven_heads() -> None:
    model = nn.ModuleDict({"q": nn.Linear(12, 12), "norm": nn.LayerNorm(4), "mlp": nn.Linear(12, 9)})
    model["attention"] = nn.MultiheadAttention(12, 3)
    splits = {"q": SplitBy(heads=12, groups=3), "norm": Split.whole, "mlp": Split.column, "attention": Split.heads}
    assert largest_shares(model, splits, 2) == (("q", 2 / 3), ("mlp", 1 / 2), ("attention", 2 / 3))
    assert largest_shares(model, splits, 1) == ()
