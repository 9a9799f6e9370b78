"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.optimizer import Group, Optimizer, sgd_step
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register("optimizer", "sgd")
class Sgd(Optimizer):
    """v = momentum * v + g + weight_decay * p; p = p - lr * v. Equals torch.optim.SGD without dampening.

    v starts at zero, so that its first value is the gradient, as in torch. Source: Sutskever et al. 2013 (Nesterov: section 2).
    """

    momentum: float = option(default=0.9, least=0, below=1, doc="share of the last update that is kept; 0 keeps no state")
    nesterov: bool = option(default=False, doc="look ahead along the momentum (Nesterov)")
    weight_decay: float = option(default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)")
    decay_norm_and_bias: bool = option(
        default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too, as the published ResNet recipes do"
    )

    def check(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov=true needs a momentum; use optimizer.momentum=0.9 or optimizer.nesterov=false")

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {"momentum": torch.zeros_like(parameter, requires_grad=False)} if self.momentum else {}

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        momenta = group.slots["momentum"] if self.momentum else None
        sgd_step(group.parameters, gradients, momenta, skip, lr, self.momentum, group.weight_decay, self.nesterov)
