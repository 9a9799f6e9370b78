"""Hooks, functions with gradients of their own, and models that differentiate inside."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportOperatorIssue=false
# To its types what a hook gets is a dict.
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, regression, vectors, zoo_model

CLASSES = 4


class Net(nn.Module):
    """Two layers; subclasses add hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.prepare()

    def prepare(self) -> None:
        pass

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round (domain adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class Quantise(torch.autograd.Function):
    """Rounds to a grid; the gradient passes where the input is in range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1)


@zoo_model("gradient_reversal", vectors(), cross_entropy, "autograd")
class Reversed(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h) + Reverse.apply(torch.tanh(h))


@zoo_model("straight_through", vectors(), cross_entropy, "autograd")
class Quantised(Net):
    def between(self, h: Tensor) -> Tensor:
        return Quantise.apply(h)


@zoo_model("gradient_hook_linear", vectors(), cross_entropy, "hooks")
class LinearHook(Net):
    """A hook on a parameter scales its gradient: the same for a sum of micro-batches."""

    def prepare(self) -> None:
        self.first.weight.register_hook(lambda gradient: gradient * 0.1)


@zoo_model("gradient_hook_mask", vectors(), cross_entropy, "hooks")
class MaskHook(Net):
    """Keeps some elements where they are."""

    def prepare(self) -> None:
        mask = torch.rand(12, 8) > 0.5
        self.first.weight.register_hook(lambda gradient: gradient * mask.to(gradient))


@zoo_model("gradient_hook_clamp", vectors(), cross_entropy, "hooks", "nonlinear hook", may={"fsdp": "layout"})
class ClampHook(Net):
    """Clips each element, per micro-batch: what it does to a sum is not the sum of what it does to its parts."""

    def prepare(self) -> None:
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))


@zoo_model("accumulated_gradient_hook", vectors(), cross_entropy, "hooks", refused={"divided": "layout"})
class AfterHook(Net):
    """A hook that runs after a gradient is accumulated, and changes it: what it does depends on the sum so far."""

    def prepare(self) -> None:
        def scale(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        self.first.weight.register_post_accumulate_grad_hook(scale)


@zoo_model("activation_gradient_hook", vectors(), cross_entropy, "hooks")
class ActivationHook(Net):
    """A hook on an activation, registered in each pass."""

    def between(self, h: Tensor) -> Tensor:
        h = torch.relu(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
        return h


@zoo_model("forward_hook", vectors(), cross_entropy, "hooks")
class ForwardHook(Net):
    """A hook that changes the output of a module."""

    def prepare(self) -> None:
        self.first.register_forward_hook(lambda module, inputs, output: output * 1.5)


@zoo_model("forward_pre_hook", vectors(), cross_entropy, "hooks")
class PreHook(Net):
    """A hook that changes the input of a module, with keywords."""

    def prepare(self) -> None:
        self.first.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] - 0.1,), kwargs), with_kwargs=True)


@zoo_model("backward_hook", vectors(), cross_entropy, "hooks")
class BackwardHook(Net):
    """A hook that changes the gradient of a module's input."""

    def prepare(self) -> None:
        self.last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@zoo_model("captured_features", vectors(), cross_entropy, "hooks")
class Captured(Net):
    """A hook puts features aside, and the forward pass reads them."""

    def prepare(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.first.register_forward_hook(lambda module, inputs, output: self.kept.update(h=output))

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        return self.last(torch.relu(self.kept.pop("h")))


def _penalised(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    scores, slope = outputs
    return (scores[:, 0] - targets[:, 0].to(scores)) ** 2 + 0.1 * (slope - 1) ** 2


@zoo_model("gradient_penalty", regression(), _penalised, "autograd", "second order", may={"fsdp": "layout"})
class Penalised(nn.Module):
    """The slope of the output with respect to the input is an output: second order derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=self.training)
        return out, slope.pow(2).sum(1).add(1e-12).sqrt()


@zoo_model("energy_forces", regression(), _penalised, "autograd", "second order", may={"fsdp": "layout"})
class Forces(Penalised):
    """As networks for molecules: the output is a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = super().forward(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=self.training)
        return out, force.sum(1)


@zoo_model("inner_steps", vectors(), cross_entropy, "autograd", "second order", "rows coupled")
class Inner(nn.Module):
    """A step of gradient descent inside the forward pass (meta learning): rows are coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(CLASSES, 8))
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = self.weight
            inner = (F.linear(x, weight)[:, 0] - x[:, 0]).pow(2).mean()
            (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
            return F.linear(x, weight - self.rate * gradient)


@zoo_model("functional_call", vectors(), cross_entropy, "autograd")
class Functional(nn.Module):
    """torch.func: the model is called with weights that are functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain = nn.Linear(8, CLASSES), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: self.gain * p for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, (x,))
