"""Weights that are functions of other tensors: spectral and weight norm, old and new, parametrizations of one's own."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.entries import cross_entropy, vectors, zoo_model

CLASSES = 4


def _net(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), middle, nn.ReLU(), nn.Linear(12, CLASSES))


def _old(wrap: str, module: nn.Module, **options: int) -> nn.Module:
    """A norm of torch before parametrizations, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(nn.utils, wrap)(module, **options)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Positive(nn.Module):
    """With an inverse, so that the weight may be assigned."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(x)

    def right_inverse(self, y: Tensor) -> Tensor:
        return y + torch.log(-torch.expm1(-y.clamp(min=1e-3)))


class LowRank(nn.Module):
    """A frozen weight and a low-rank change of it, with parameters of its own."""

    def __init__(self, rows: int, columns: int, rank: int = 2) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(rows, rank)), nn.Parameter(torch.randn(rank, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + self.up @ self.down


class CountedMask(nn.Module):
    """A mask in a buffer, as pruning makes it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", weight.abs() > weight.abs().median())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def _square() -> nn.Linear:
    return nn.Linear(12, 12)


zoo_model("spectral_norm", vectors(), cross_entropy, "parametrized", "power iteration")(
    lambda: _net(parametrizations.spectral_norm(_square()))
)
zoo_model("spectral_norm_old", vectors(), cross_entropy, "parametrized", "power iteration")(
    lambda: _net(_old("spectral_norm", _square()))
)
zoo_model("spectral_norm_patient", vectors(), cross_entropy, "parametrized", "power iteration")(
    lambda: _net(parametrizations.spectral_norm(_square(), n_power_iterations=3))
)
zoo_model("weight_norm", vectors(), cross_entropy, "parametrized")(
    lambda: _net(parametrizations.weight_norm(_square()))
)
zoo_model("weight_norm_old", vectors(), cross_entropy, "parametrized")(lambda: _net(_old("weight_norm", _square())))
zoo_model("weight_norm_whole", vectors(), cross_entropy, "parametrized")(
    lambda: _net(parametrizations.weight_norm(_square(), dim=None))  # type: ignore[arg-type]
)
zoo_model("orthogonal", vectors(), cross_entropy, "parametrized")(lambda: _net(parametrizations.orthogonal(_square())))
zoo_model("orthogonal_cayley", vectors(), cross_entropy, "parametrized")(
    lambda: _net(parametrizations.orthogonal(_square(), orthogonal_map="cayley"))
)


@zoo_model("symmetric", vectors(), cross_entropy, "parametrized")
def symmetric() -> nn.Module:
    model = _square()
    parametrize.register_parametrization(model, "weight", Symmetric())
    return _net(model)


@zoo_model("positive", vectors(), cross_entropy, "parametrized")
def positive() -> nn.Module:
    model = _square()
    with torch.no_grad():
        model.weight.abs_().add_(0.01)
    parametrize.register_parametrization(model, "weight", Positive())
    return _net(model)


@zoo_model("lora", vectors(), cross_entropy, "parametrized", "frozen")
def lora() -> nn.Module:
    model = _square()
    model.weight.requires_grad_(False)
    parametrize.register_parametrization(model, "weight", LowRank(12, 12))
    return _net(model)


@zoo_model("pruned", vectors(), cross_entropy, "parametrized")
def pruned() -> nn.Module:
    model = _square()
    parametrize.register_parametrization(model, "weight", CountedMask(model.weight.detach()))
    return _net(model)


@zoo_model("pruned_old", vectors(), cross_entropy, "parametrized")
def pruned_old() -> nn.Module:
    """torch's pruning: a mask in a buffer, a hook before the forward pass, the weight a plain attribute."""
    from torch.nn.utils import prune

    return _net(prune.l1_unstructured(_square(), "weight", amount=0.5))


@zoo_model("two_parametrizations", vectors(), cross_entropy, "parametrized")
def two() -> nn.Module:
    model = _square()
    parametrize.register_parametrization(model, "weight", Symmetric())
    parametrize.register_parametrization(model, "weight", CountedMask(model.weight.detach()))
    return _net(model)


@zoo_model("weight_of_a_network", vectors(), cross_entropy, "parametrized")
class Hyper(nn.Module):
    """A network whose weights another one makes from a code."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3))
        self.maker = nn.Linear(3, 8 * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.maker(self.code).view(8, CLASSES)
