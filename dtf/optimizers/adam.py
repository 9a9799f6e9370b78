"""Adam, its weight decay an L2 penalty on the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.optimizer import Group, Optimizer, counter
from dtf.registry import option, register

if TYPE_CHECKING:
    from torch import Tensor


@register("optimizer", "adam")
class Adam(Optimizer):
    """Steps of about the learning rate whatever the size of gradients. Weight decay is an L2 penalty, added to the gradient. Equals torch.optim.Adam.

    Source: Kingma & Ba 2015, alg. 1 (arXiv:1412.6980).
    """

    beta1: float = option(default=0.9, least=0, below=1, doc="decay of the running mean of gradients")
    beta2: float = option(default=0.999, least=0, below=1, doc="decay of the running mean of squared gradients")
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    weight_decay: float = option(default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)")
    decay_norm_and_bias: bool = option(default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too")

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {
            "mean": torch.zeros_like(parameter, requires_grad=False),
            "square": torch.zeros_like(parameter, requires_grad=False),
            "step": counter(parameter),
        }

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        from torch.optim.adam import adam

        adam(
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
