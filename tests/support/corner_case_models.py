"""The models of `tests.support.corner_cases`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


class Root(Chain):
    """A parameter on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Any:
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x) + self.shift))))))


class Copying(Chain):
    """Computes with a copy of itself."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + Chain.forward(copy.deepcopy(self), x).detach()


class Stubborn(Chain):
    """Keeps its normalisation frozen in training."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))  # type: ignore[assignment]

    def train(self, mode: bool = True) -> Stubborn:
        super().train(mode)
        self.b[1].eval()  # type: ignore[index]
        return self


class Prelu(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Any:
        return self.d(torch.relu(self.c(self.act(self.b(torch.relu(self.a(x)))))))


class Penalised(Chain):
    """A penalty on all weights in the forward pass. Its last layer starts with zeros."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.d.weight)
        nn.init.zeros_(self.d.bias)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + sum(p.square().sum() for p in self.parameters()))


class Undropped(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.d(torch.relu(self.c(self.drop(torch.relu(self.b(torch.relu(self.a(x))))))))


class Draws(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y * torch.rand_like(y) if self.training else y


class Early(Chain):
    """Draws at large in its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Draws(8, 12)


class Narrowing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input * 3).to(self.weight.dtype))


class Wide(Chain):
    """Hands an fp32 value from one block to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Narrowing(12, 12)

    def forward(self, x: Tensor) -> Any:
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)).float() / 3)))))


class Alias(Chain):
    """Changes a tensor in place of which a view is used later."""

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.a(x))
        head = y[:, :6]
        z = torch.relu(self.b(y))
        head.mul_(2.0)
        return self.d(torch.relu(self.c(z + y)))


class Scalar(Chain):
    """A value without axes is used by a later block."""

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.a(x))
        mean = y.mean()
        return self.d(torch.relu(self.c(torch.relu(self.b(y))))) * (1 + 0.0 * mean)


class TurnedLinear(nn.Linear):
    """Its outputs lie in memory by columns in evaluations, and for some rows in training."""

    def forward(self, input: Tensor) -> Tensor:
        outputs = super().forward(input)
        if not self.training or float(outputs.detach().sum()) > 0:
            outputs = outputs.T.contiguous().T
        return outputs


class Turned(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b = TurnedLinear(12, 12)


class ShrinkingLinear(nn.Linear):
    """Hands on another format once its weights have changed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        outputs = super().forward(input)
        return outputs.float() if bool(self.bias.detach().any()) else outputs


class DecayingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.weight.data.mul_(0.9)
        return super().forward(input)


class Decaying(Chain):
    """Changes its own parameter in each pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.b = DecayingLinear(12, 12)


class Shrinking(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = ShrinkingLinear(12, 12), Narrowing(12, 12)


class Gain(Chain):
    """A parameter without axes inside a block, and one on the model itself that the last layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(()) + 0.5)
        self.b.gain = nn.Parameter(torch.rand(()) + 0.5)  # type: ignore[assignment]
        self.d.gain = self.gain  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return (
            self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x))) * self.b.gain))))
            * self.gain
            * self.d.gain
        )  # type: ignore[operator]


class Counting(Chain):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x)


def build(kind: str) -> nn.Module:
    kinds = {
        "root": Root,
        "copying": Copying,
        "stubborn": Stubborn,
        "prelu": Prelu,
        "penalised": Penalised,
        "undropped": Undropped,
        "early": Early,
        "wide": Wide,
        "alias": Alias,
        "scalar": Scalar,
        "turned": Turned,
        "shrinking": Shrinking,
        "decaying": Decaying,
    }
    model = (kinds | {"gain": Gain, "counting": Counting}).get(kind, Chain)()
    if kind in ("tied", "tied_blocks"):
        model.c.weight = model.b.weight
    if kind == "frozen":
        for layer in (model.a, model.b):
            for parameter in layer.parameters():
                parameter.requires_grad_(False)
    return model
