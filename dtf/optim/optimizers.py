"""Optimizers: torch-free until they step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.optimizer import AdamMoments, Group, Optimizer, counter, sgd_step
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register("optimizer", "sgd")
class Sgd(Optimizer):
    """v = momentum * v + g + weight_decay * p; p = p - lr * v. Equals torch.optim.SGD without dampening.

    v starts at zero, so that its first value is the gradient, as in torch. Source: Sutskever et al. 2013 (Nesterov:
    section 2).
    """

    momentum: float = option(
        default=0.9, least=0, below=1, doc="share of the last update that is kept; 0 keeps no state"
    )
    nesterov: bool = option(default=False, doc="look ahead along the momentum (Nesterov)")
    weight_decay: float = option(
        default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)"
    )
    decay_norm_and_bias: bool = option(
        default=True,
        doc="let weight decay act on biases and normalisation scales (parameters with one axis) too, as the published "
        "ResNet recipes do",
    )

    def check(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "optimizer.nesterov=true needs a momentum; use optimizer.momentum=0.9 or optimizer.nesterov=false"
            )

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {"momentum": torch.zeros_like(parameter, requires_grad=False)} if self.momentum else {}

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        momenta = group.slots["momentum"] if self.momentum else None
        sgd_step(group.parameters, gradients, momenta, skip, lr, self.momentum, group.weight_decay, self.nesterov)


@register("optimizer", "adam")
class Adam(AdamMoments):
    """Steps of about the learning rate whatever the size of gradients. Weight decay is an L2 penalty, added to the
    gradient. Equals torch.optim.Adam.

    Source: Kingma & Ba 2015, alg. 1 (arXiv:1412.6980).
    """

    weight_decay: float = option(
        default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)"
    )


@register("optimizer", "adamw")
class AdamW(AdamMoments):
    """Adam whose weight decay acts on the parameter itself: p = p * (1 - lr * weight_decay). Equals torch.optim.AdamW.

    Source: Loshchilov & Hutter 2019, alg. 2 (arXiv:1711.05101); Kingma & Ba 2015 (arXiv:1412.6980).
    """

    decoupled = True

    weight_decay: float = option(
        default=0.01, least=0, doc="share of the parameter, times the learning rate, that is taken off each step"
    )


@register("optimizer", "adagrad")
class Adagrad(Optimizer):
    """Divide each element's step by the root of its summed squared gradients. Equals torch.optim.Adagrad.

    Source: Duchi, Hazan & Singer 2011 (jmlr.org/papers/v12/duchi11a.html).
    """

    initial_accumulator: float = option(
        default=0.0, least=0, doc="first value of the sums; more than 0 tames the first steps of rare elements"
    )
    eps: float = option(default=1e-10, above=0, doc="added to the denominator")
    lr_decay: float = option(
        default=0.0, least=0, doc="divide the learning rate by 1 + lr_decay * finished steps, on top of the schedule"
    )
    weight_decay: float = option(
        default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)"
    )
    decay_norm_and_bias: bool = option(
        default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too"
    )

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {
            "sum": torch.full_like(parameter, self.initial_accumulator, requires_grad=False),
            "step": counter(parameter),
        }

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        from torch.optim.adagrad import adagrad

        adagrad(
            group.parameters,
            gradients,
            group.slots["sum"],
            group.slots["step"],
            fused=True,
            found_inf=skip,
            lr=lr,
            weight_decay=group.weight_decay,
            lr_decay=self.lr_decay,
            eps=self.eps,
            maximize=False,
        )


@register("optimizer", "lars")
class Lars(Optimizer):
    """Momentum whose step of each tensor is a fixed share of the tensor's norm: ratio = trust * |p| / (|g| +
    weight_decay * |p|).

    v = momentum * v + lr * ratio * (g + weight_decay * p); p = p - v. The learning rate is part of v, as published. A
    tensor that does not decay is not adapted: ratio = 1; nor is one whose parameter or gradient is all zeros. Source:
    You, Gitman & Ginsburg 2017, alg. 1 (arXiv:1708.03888).
    """

    by_tensor = True

    momentum: float = option(
        default=0.9, least=0, below=1, doc="share of the last update that is kept; 0 keeps no state"
    )
    trust_coefficient: float = option(
        default=0.001, above=0, doc="length of a step as a share of the tensor's norm, at lr = 1"
    )
    eps: float = option(default=1e-8, least=0, doc="added to the denominator of the ratio")
    weight_decay: float = option(
        default=1e-4, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)"
    )
    decay_norm_and_bias: bool = option(
        default=False,
        doc="decay and adapt biases and normalisation scales (parameters with one axis) too; their small norms make "
        "poor ratios",
    )

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {"momentum": torch.zeros_like(parameter, requires_grad=False)} if self.momentum else {}

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        import torch

        if group.decayed:
            squares = self.squares(group.parameters, gradients)
            ratios = self.ratios(group.combine(squares) if group.combine else squares, group.weight_decay)
            moves = torch._foreach_add(gradients, group.parameters, alpha=group.weight_decay)
            torch._foreach_mul_(moves, (ratios * lr).unbind())
        else:
            moves = torch._foreach_mul(gradients, lr)
        # What is left is momentum at learning rate 1: torch's kernel does it, and knows how to skip.
        sgd_step(
            group.parameters, list(moves), group.slots["momentum"] if self.momentum else None, skip, 1.0, self.momentum
        )

    def squares(self, parameters: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Squared norms of what this rank holds, shape (2, n), of parameters and of gradients: sums that add up over
        ranks.
        """
        import torch

        wide = torch.promote_types(parameters[0].dtype, torch.float32)
        norms = torch._foreach_norm([*parameters, *gradients], 2, dtype=wide)
        return torch.stack(norms).square().view(2, -1)

    def ratios(self, squares: Tensor, weight_decay: float) -> Tensor:
        """The ratio of each tensor, shape (n,), from the squared norms of whole tensors."""
        import torch

        parameter, gradient = squares.sqrt()
        ratio = self.trust_coefficient * parameter / (gradient + weight_decay * parameter + self.eps)
        return torch.where((parameter > 0) & (gradient > 0), ratio, 1.0)
