"""Adam with decoupled weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.optimizer import Group, Optimizer, counter
from dtf.registry import option, register

if TYPE_CHECKING:
    from torch import Tensor


@register("optimizer", "adamw")
class AdamW(Optimizer):
    """Adam whose weight decay acts on the parameter itself: p = p * (1 - lr * weight_decay). Equals torch.optim.AdamW.

    Source: Loshchilov & Hutter 2019, alg. 2 (arXiv:1711.05101); Kingma & Ba 2015 (arXiv:1412.6980).
    """

    beta1: float = option(default=0.9, least=0, below=1, doc="decay of the running mean of gradients")
    beta2: float = option(default=0.999, least=0, below=1, doc="decay of the running mean of squared gradients")
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    weight_decay: float = option(default=0.01, least=0, doc="share of the parameter, times the learning rate, that is taken off each step")
    decay_norm_and_bias: bool = option(default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too")

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {
            "mean": torch.zeros_like(parameter, requires_grad=False),
            "square": torch.zeros_like(parameter, requires_grad=False),
            "step": counter(parameter),
        }

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        from torch.optim.adamw import adamw

        adamw(
            group.parameters,
            gradients,
            group.slots["mean"],
            group.slots["square"],
            [],
            group.slots["step"],
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=group.weight_decay,
            eps=self.eps,
            maximize=False,
        )
