"""Adam with decoupled weight decay."""

from __future__ import annotations

from dtf.api.optimizer import AdamMoments
from dtf.api.registry import option, register


@register("optimizer", "adamw")
class AdamW(AdamMoments):
    """Adam whose weight decay acts on the parameter itself: p = p * (1 - lr * weight_decay). Equals torch.optim.AdamW.

    Source: Loshchilov & Hutter 2019, alg. 2 (arXiv:1711.05101); Kingma & Ba 2015 (arXiv:1412.6980).
    """

    decoupled = True

    weight_decay: float = option(default=0.01, least=0, doc="share of the parameter, times the learning rate, that is taken off each step")
