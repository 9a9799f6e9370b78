"""Adam, its weight decay an L2 penalty on the loss."""

from __future__ import annotations

from dtf.api.optimizer import AdamMoments
from dtf.api.registry import option, register


@register("optimizer", "adam")
class Adam(AdamMoments):
    """Steps of about the learning rate whatever the size of gradients. Weight decay is an L2 penalty, added to the gradient. Equals torch.optim.Adam.

    Source: Kingma & Ba 2015, alg. 1 (arXiv:1412.6980).
    """

    weight_decay: float = option(default=0.0, least=0, doc="factor of the parameter that is added to its gradient (L2 penalty)")
