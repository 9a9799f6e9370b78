"""Ranks that build different models, or start from different numbers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.distributed.world import World
from dtf.engine.initial_numbers import _digest, _tensors, agree_on_start


class SecondOfTwo:
    """The world as rank 1 of 2 sees it, and rank 0 too: what it would gather and send comes from `first`."""

    size, rank = 2, 1

    def __init__(self, first: nn.Module) -> None:
        self._first, self._asked = dict(_tensors(first)), iter(())

    def gather(self, value: Any) -> list[Any]:
        return [{name: _digest(tensor) for name, tensor in self._first.items()}, value]

    def broadcast(self, value: Any) -> Any:
        self._asked = iter(value[0])
        return value

    def send_from_first(self, tensor: Tensor) -> None:
        tensor.copy_(self._first[next(self._asked)])


def agree(first: nn.Module, second: nn.Module) -> list[str]:
    said: list[str] = []
    agree_on_start(cast(World, SecondOfTwo(first)), second, said.append)
    return said


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (nn.Linear(4, 7), r"weight, \(7, 4\) torch.float32 and not \(4, 4\) torch.float32"),
        (nn.Linear(4, 4).double(), r"weight, \(4, 4\) torch.float64 and not"),
        (nn.Linear(4, 4, bias=False), "differ in bias"),
    ],
    ids=["shape", "format", "names"],
)
def test_another_model_is_refused_by_name(second: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=f"rank 1 builds another model than rank 0: .*{words}"):
        agree(nn.Linear(4, 4), second)


def test_numbers_that_differ_are_those_of_rank_0() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        second.bias.copy_(first.bias)
    said = agree(first, second)
    assert len(said) == 1 and "for 1 tensor, weight first" in said[0]
    assert torch.equal(first.weight, second.weight)


def test_equal_models_are_left_alone() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.load_state_dict(first.state_dict())
    assert agree(first, second) == []
