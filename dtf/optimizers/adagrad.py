"""Adagrad: a learning rate of its own for each element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.optimizer import Group, Optimizer, counter
from dtf.api.registry import option, register

if TYPE_CHECKING:
    from torch import Tensor


@register("optimizer", "adagrad")
class Adagrad(Optimizer):
    """Divide each element's step by the root of its summed squared gradients. Equals torch.optim.Adagrad.

    Source: Duchi, Hazan & Singer 2011 (jmlr.org/papers/v12/duchi11a.html).
    """

    initial_accumulator: float = option(default=0.0, least=0, doc="first value of the sums; more than 0 tames the first steps of rare elements")
    eps: float = option(default=1e-10, above=0, doc="added to the denominator")
    lr_decay: float = option(default=0.0, least=0, doc="divide the learning rate by 1 + lr_decay * finished steps, on top of the schedule")
    weight_decay: float = option(default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)")
    decay_norm_and_bias: bool = option(default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too")

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {"sum": torch.full_like(parameter, self.initial_accumulator, requires_grad=False), "step": counter(parameter)}

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
