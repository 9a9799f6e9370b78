"""What `placed` registers: convolutions, and between them what a format of memory may change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class DrawnModules(nn.Module):
    """Layers of torch that draw: their masks are the same in each format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drops = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3))
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)

    def between(self, x: Tensor) -> Tensor:
        return self.drops(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(torch.relu(self.norm(self.first(x))))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


class Dropout(DrawnModules):
    def between(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, self.training)


class Noise(DrawnModules):
    def between(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x) if self.training else x


class Bernoulli(DrawnModules):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.7) if self.training else x


class RowsDropped(DrawnModules):
    """Stochastic depth as torchvision has it: a number for each row."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.7) if self.training else x


class HiddenDropout(DrawnModules):
    """Its dropout shows in no output and in no gradient at the start: layers of zeros come after it."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.second.parameters(), *self.head.parameters()):
            nn.init.zeros_(parameter)

    def between(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, self.training)


class Strided(DrawnModules):
    """Weights numbers by their place in memory, in training."""

    def between(self, x: Tensor) -> Tensor:
        return x + _by_place(x) if self.training else x


class StridedBackward(DrawnModules):
    def between(self, x: Tensor) -> Tensor:
        return _Weighted.apply(x)


class ViewedBackward(DrawnModules):
    def between(self, x: Tensor) -> Tensor:
        return _Viewed.apply(x)


class HookOnActivations(DrawnModules):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: (gradient.view(-1) * 0.5).view(gradient.shape))
        return x


class HookOnWeights(DrawnModules):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: (gradient.view(-1) * 0.5).view(gradient.shape))


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + _by_place(gradient)


class _Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return (gradient.view(-1) * 0.5).view(gradient.shape)


def _by_place(x: Tensor) -> Tensor:
    flat = x.as_strided((x.numel(),), (1,))
    return (flat * torch.linspace(-0.5, 0.5, x.numel())).as_strided(x.shape, x.stride())


_DRAWS = "the model's outputs in training are others with channels last: it draws or reads by places in memory"
_VIEWS = "the model does not compute images whose channels are last: view size is not compatible"
KINDS: dict[str, type[DrawnModules]] = {
    "drawn_modules": DrawnModules,
    "rows_dropped": RowsDropped,
    "dropout": Dropout,
    "noise": Noise,
    "bernoulli": Bernoulli,
    "hidden_dropout": HiddenDropout,
    "strided": Strided,
    "strided_backward": StridedBackward,
    "viewed_backward": ViewedBackward,
    "hook_on_activations": HookOnActivations,
    "hook_on_weights": HookOnWeights,
}
WHY = {
    "drawn_modules": "",
    "rows_dropped": "",
    "dropout": _DRAWS,
    "noise": _DRAWS,
    "bernoulli": _DRAWS,
    "hidden_dropout": _DRAWS,
    "strided": _DRAWS,
    "strided_backward": "gradients of first are others with channels last: backward reads memory by its place",
    "viewed_backward": _VIEWS,
    "hook_on_activations": _VIEWS,
    "hook_on_weights": _VIEWS,
}
"""Why their channels stay first; empty: they do not."""
