"""A model with a module that keeps something in plain attributes, by the rows of its rank. A plugin.

`always`: a running mean that its outputs use, from the first pass on. `late`: the same after some passes. `once`: a
count of its rows that is used after some passes. `shown`: its last input, to be looked at. `grown`: scratch memory of
the longest batch that it met. `clock`: the time of its last pass. `parameter`: a parameter that some of its passes
change behind torch's back. `counts`: a number of passes that is used after some. `evaluated`: a running mean that
evaluations use. `evaluations`: a number of evaluated micro-batches that is used after some.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import Tensor, nn

AFTER = 14
"""Passes over other rows after which `late` and such begin: more than the check at the start makes."""


@register("recipe", "hoarding")
class Hoarding(Toy):
    kind: str = option(default="late", doc="what is kept")

    def build_model(self) -> nn.Module:
        model = super().build_model()
        setattr(model, "8", build(self.kind))
        return model


def build(kind: str) -> nn.Module:
    import torch
    from torch import nn

    class Hoard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.passes, self.seen, self.memory = torch.zeros(()), 0, [0], {}
            self.walked: set[float] = set()
            if kind == "parameter":
                self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            if kind == "evaluated":
                self.kept = x.detach().mean() if self.training else self.kept + x.mean()
                return torch.tanh(x if self.training else x + 0.1 * self.kept)
            if kind == "evaluations":
                self.passes += not self.training
                return torch.tanh(x + (self.passes > AFTER))
            if not self.training:
                return torch.tanh(x)
            self.passes += 1
            if kind == "counts" and self.passes > AFTER:
                x = 2 * x
            self.walked.add(float(x.detach().sum()))
            late = len(self.walked) > AFTER
            if kind == "always" or (kind == "late" and late):
                self.kept = 0.9 * self.kept + 0.1 * x.detach().mean()
                x = x + self.kept
            elif kind == "once":
                self.seen[0] += int((x > 0).sum())
                x = x * (1 + 1e-3 * self.seen[0] * late)
            elif kind == "shown" and late:
                self.kept = x.detach()
            elif kind == "grown":
                self.memory.setdefault(int((x > 0).sum()), torch.zeros(3))
            elif kind == "clock":
                self.kept = time.monotonic_ns()
            elif kind == "parameter":
                if late:
                    self.scale.data.mul_(1 + 0.01 * float(x.detach().mean()))
                x = x * self.scale
            return torch.tanh(x)

    return Hoard()
