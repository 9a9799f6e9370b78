"""Layers of torchvision and timm that drop whole rows: their masks are functions of the seed, the step, the micro-batch
and the layer.
"""

from __future__ import annotations

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from dtf.model.seeded_dropout import SeededDropout, is_seeded, seeded_dropouts

KINDS = {
    "torchvision": lambda: StochasticDepth(0.25, "row"),
    "torchvision, all rows": lambda: StochasticDepth(0.25, "batch"),
    "timm": lambda: DropPath(0.25),
}


def passes(kind: str, seed: int = 0, step: int = 0, times: int = 1) -> list[Tensor]:
    model = nn.ModuleDict({"drop": KINDS[kind]()})
    masks = SeededDropout(model, seed, torch.device("cpu"))
    masks.begin_micro_batch(step, 0)
    return [model["drop"](torch.ones(64, 3, 2)) for _ in range(times)]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_the_layer_and_follow_seed_step_and_call(kind: str) -> None:
    first, second = passes(kind, times=2)
    assert first.equal(passes(kind)[0])
    rows = first[:, 0, 0]
    assert first.equal(rows[:, None, None].expand(64, 3, 2)), "a row is dropped as a whole"
    assert set(rows.tolist()) <= {0.0, torch.tensor(1 / 0.75).item()}
    if kind == "torchvision, all rows":
        assert len(set(rows.tolist())) == 1
        assert len({passes(kind, step=step)[0][0, 0, 0].item() for step in range(40)}) == 2
    else:
        assert 4 <= int((rows == 0).sum()) <= 30
        assert not second.equal(first)
        assert not passes(kind, seed=1)[0].equal(first) and not passes(kind, step=1)[0].equal(first)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_drops_nothing_and_a_layer_becomes_what_it_was(kind: str) -> None:
    model = nn.ModuleDict({"drop": KINDS[kind]()})
    before = type(model["drop"])
    with seeded_dropouts(model):
        assert type(model["drop"]) is not before
        assert model.eval()["drop"](torch.ones(4, 2)).equal(torch.ones(4, 2))
    assert type(model["drop"]) is before


def test_what_does_not_scale_is_left_alone() -> None:
    assert not is_seeded(DropPath(0.5, scale_by_keep=False)) and is_seeded(DropPath(0.5)) and not is_seeded(nn.ReLU())
