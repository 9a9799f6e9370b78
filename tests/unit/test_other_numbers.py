"""Other numbers for a comparison, which leave no trace."""

from __future__ import annotations

import torch
from torch import nn

from dtf.strategies.output_reference import _Numbers


def test_parameters_of_every_kind_are_as_they_were() -> None:
    """Zeros, ones, small numbers, and what is no real number: integers and eight bits."""
    linear = nn.Linear(4, 3)
    model = nn.Sequential(linear, nn.LayerNorm(3))
    with torch.no_grad():
        linear.weight.mul_(0.01)
        linear.bias.zero_()
    model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_parameter("small", nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn), requires_grad=False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    numbers = _Numbers.others(model)
    assert set(numbers.constants) == {"0.bias", "1.weight", "1.bias"} and set(numbers.factors) == {"0.weight"}
    with numbers.put([(model, {})]):
        now = dict(model.named_parameters())
        assert all(now[name].unique().numel() > 1 for name in numbers.constants)
        assert now["0.weight"].norm() > 20 * before["0.weight"].norm()
        assert torch.equal(now["table"], before["table"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name
