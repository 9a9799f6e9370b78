"""Models that count their passes: in their class, in their Python module, and to act every so many of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.entries import cross_entropy, vectors, zoo_model

CLASSES = 4
_passes = 0


@zoo_model("count_of_its_class", vectors(), cross_entropy, "state", "hidden state", "attribute")
class ClassCount(nn.Module):
    """A temperature that falls with the passes of all models of its class."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        ClassCount.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            ClassCount.passes += 1
        return self.layer(x) / (2.0 if ClassCount.passes > 20 else 1.0)


@zoo_model("count_of_its_file", vectors(), cross_entropy, "state", "hidden state", "attribute")
class FileCount(nn.Module):
    """As ClassCount, in a name of the Python module."""

    def __init__(self) -> None:
        global _passes
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        _passes = 0

    def forward(self, x: Tensor) -> Tensor:
        global _passes
        if self.training:
            _passes += 1
        return self.layer(x) / (1 + _passes / 100)


class Every(nn.Module):
    """Adds a penalty on large outputs every so many passes (lazy regularisation, as in StyleGAN2)."""

    def __init__(self, period: int, first: int = 0) -> None:
        super().__init__()
        self.layer, self.period, self.passes = nn.Linear(8, CLASSES), period, first

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes % self.period == 0:
                return self.layer(x) * 0.5
        return self.layer(x)


for _period in (7, 125):
    zoo_model(f"every_{_period}_passes", vectors(), cross_entropy, "state", "hidden state", "attribute")(
        lambda period=_period: Every(period)
    )


@zoo_model("count_from_a_thousand", vectors(), cross_entropy, "state", "hidden state", "attribute")
class FromThousand(Every):
    def __init__(self) -> None:
        super().__init__(50, 1000)


@zoo_model("count_for_a_log", vectors(), cross_entropy, "attribute")
class Logged(nn.Module):
    """Counts its passes, and the largest output so far, for people to look at."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps, self.largest = nn.Linear(8, CLASSES), 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        Logged.passes += 1
        self.steps += 1
        out = self.layer(x)
        self.largest = max(self.largest, float(out.detach().abs().max()))
        return out


@zoo_model("weights_that_decay_by_themselves", vectors(), cross_entropy, "parameters change in forward", "hidden state")
class SelfDecay(nn.Module):
    """Shrinks its weights in each pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.first.weight.mul_(0.99)
        return self.last(torch.relu(self.first(x)))


@zoo_model("values_from_a_stream", vectors(), cross_entropy, "state", refused={"*": "hidden state"})
class Streams(nn.Module):
    """Its temperatures come from a generator of Python, which nothing can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.temperatures = (1 + 1 / number for number in range(1, 1_000_000))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (next(self.temperatures) if self.training else 1.0)


@zoo_model("first_pass_flag", vectors(), cross_entropy, "state", buffers={"ready": "mean"})
class FirstPassFlag(nn.Module):
    """A flag that the first pass sets, a boolean buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * (1.0 if self.ready else 0.5)
        if self.training:
            self.ready = torch.ones_like(self.ready)
        return out
