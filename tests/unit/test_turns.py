"""Models that move into memory which ranks share, and how much of it a model may take."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtf.engine import turns
from dtf.engine.turns import TooLargeError


class Odd(nn.Module):
    """Ties, views, several formats, a hook, an empty and a scalar parameter, buffers that share memory."""

    small: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.second.weight = self.first.weight
        self.whole = nn.Parameter(torch.randn(4, 6))
        self.part = nn.Parameter(self.whole.data[1:3, 2:])
        self.picture = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.scalar, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("small", torch.randn(5).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]), persistent=False)
        self.register_buffer("view", self.small[1:])
        self.calls = 0
        self.whole.register_hook(self._called)

    def _called(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient


def _named(model: nn.Module) -> dict[str, Tensor]:
    return turns._tensors(model)


def _shared(model: nn.Module, other: nn.Module) -> tuple[Any, Any]:
    """What `Turns.share` does with the first rank's model and with one of another rank."""
    turns._drop_numbers(other)
    file, (path, names, places) = turns._write(model)
    assert names == list(_named(other))
    for one in (model, other):
        turns._take(_named(one), path, places)
    os.close(file)
    return model, other


def test_a_model_keeps_all_it_had() -> None:
    torch.manual_seed(0)
    before = Odd()
    expected = {name: (t.clone(), t.stride(), t.dtype) for name, t in _named(before).items()}
    parameters = dict(before.named_parameters())
    for model in _shared(before, Odd()):
        for name, tensor in _named(model).items():
            value, stride, dtype = expected[name]
            assert torch.equal(tensor, value) and (tensor.stride(), tensor.dtype) == (stride, dtype), name
        assert model.second.weight is model.first.weight
        with torch.no_grad():
            model.whole[1, 2] = 9.0  # a view of it sees that
            model.small[1] = 3.0
        assert model.part[0, 0] == 9.0 and model.view[0] == 3.0
        (model.whole.sum() + model.second(model.first(torch.tensor([1]))).sum()).backward()
        assert model.calls == 1 and model.first.weight.grad is not None
    assert all(parameter is parameters[name] for name, parameter in before.named_parameters())


def test_what_one_rank_writes_stays_its_own() -> None:
    one, other = _shared(nn.Linear(3, 3), nn.Linear(3, 3))
    value = other.weight.detach().clone()
    with torch.no_grad():
        one.weight.zero_()
    assert torch.equal(other.weight, value) and value.any()


@pytest.mark.slow
def test_memory_is_given_back() -> None:
    model, other = _shared(nn.Linear(3, 3), nn.Linear(3, 3))
    maps = Path("/proc/self/maps")
    assert "dtf-model" in maps.read_text()
    for one in (model, other):
        for tensor in _named(one).values():
            tensor.data = tensor.data.clone()
    gc.collect()
    assert "dtf-model" not in maps.read_text()


def _copies() -> nn.Module:
    layer = nn.Linear(100, 100, bias=False)
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(5))


def _buffers() -> nn.Module:
    model = nn.Module()
    for number in range(5):
        model.register_buffer(f"b{number}", torch.zeros(100, 100))
    return model


@pytest.mark.parametrize("make", [lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(5))), _copies, _buffers])
def test_a_model_may_take_so_much(make: Any) -> None:
    size = sum(t.numel() * 4 for t in _named(make()).values())
    with pytest.raises(TooLargeError), turns._at_most(size - 1):
        make()
    make()  # nothing is counted any more
    with turns._at_most(size):
        pass
    with turns._at_most(None):
        make()


def test_tensors_without_memory_and_used_twice_take_none() -> None:
    with turns._at_most(100 * 100 * 4):
        with torch.device("meta"):
            nn.Linear(1000, 1000)
        nn.LazyLinear(10)
        first = nn.Linear(100, 100, bias=False)
        second = nn.Linear(1, 1, bias=False, device="meta")
        second.weight = first.weight
        nn.Sequential(first, second)
