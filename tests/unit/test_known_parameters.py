"""What passes do to parameters is seen, however small it is."""

from __future__ import annotations

import torch
from torch import nn

from dtf.model.known_parameters import KnownParameters


def test_a_change_that_no_sum_shows_is_seen() -> None:
    model = nn.Linear(2, 1).double()
    nn.init.ones_(model.weight)
    known = KnownParameters(model)
    assert known.changed() == []
    model.weight.data += torch.tensor([[2.0**-52, -(2.0**-52)]])  # what a merge of weights and its undoing may leave
    assert known.changed() == ["weight"]
    nn.init.ones_(model.weight.data)
    assert known.changed() == []


def test_whether_it_learns_and_where_it_lies_are_seen() -> None:
    model = nn.Linear(2, 1)
    known = KnownParameters(model)
    model.bias.requires_grad_(False)
    model.weight.data = model.weight.data.clone()
    assert known.changed() == ["weight", "bias"]
