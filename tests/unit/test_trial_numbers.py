"""A trial leaves parameters as they were, those that a model itself writes to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtf.api.options import StepOptions
from dtf.api.task import Task
from dtf.optim.optimizers import Sgd
from dtf.strategies.start_check import differences
from dtf.strategies.trial_numbers import trial
from tests.support.harness import PRECISIONS
from tests.support.toy import Toy


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kept = nn.Parameter(torch.full((4,), 3.0)), nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0.0, 2.0)
        self.calls += 1
        self.seen += 1
        return self.scale * x


class Clamped(Toy):
    def build_model(self) -> nn.Module:
        return Bounded()


def test_evaluations_before_the_first_step_leave_no_trace() -> None:
    task = Task(Clamped(), Sgd(), PRECISIONS["fp32"], StepOptions(batch_size=4), 0)
    model = Bounded()
    model.scale.data.fill_(2.5)  # a constructor that draws from what no seed reaches gives each copy other numbers
    with trial([model], task), torch.no_grad():
        model(torch.ones(4))
        assert model.scale.tolist() == [2.0] * 4
    assert model.scale.tolist() == [2.5] * 4 and model.kept.tolist() == [1.0] * 2
    assert model.calls == 0 and model.seen == 0


def test_a_gradient_that_is_not_there_is_zero() -> None:
    """FSDP gives none to what no rows have used yet, and zeros after some rows have used it."""
    once = {"sum 0": 2.0, "gradient of a": 0.5}
    assert differences(once, once | {"gradient of b": 0.0}, 1e-5) == []
    assert differences(once, once | {"gradient of b": 0.1}, 1e-5) == ["gradient of b"]
    assert differences(once, once | {"sum 1": 0.0}, 1e-5) == ["sum 1"]
