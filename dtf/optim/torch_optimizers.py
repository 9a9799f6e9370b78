"""The classes of torch.optim that step element by element and have no place in `dtf.optim.optimizers`.

Written out, so that the command line reads no source of torch; a test compares them with torch's constructors.
"""

from __future__ import annotations

from dtf.api.registry import option, register
from dtf.core.errors import ConfigError
from dtf.optim.torch_class import TorchOptimizer

_DECAYED = "factor of the parameter that is added to its gradient (L2 penalty)"
_DECOUPLED = "let weight decay act on the parameter itself, not on its gradient, as in AdamW"
_BETAS = "decays of the running means of gradients and of squared gradients"
_EPS = "added to the denominator"


@register("optimizer", "adadelta")
class Adadelta(TorchOptimizer):
    """Steps of the size of the last steps, divided by that of the last gradients; lr.peak=1 is its usual rate.
    torch.optim.Adadelta itself.

    Source: Zeiler 2012 (arXiv:1212.5701).
    """

    torch_class = "torch.optim:Adadelta"

    rho: float = option(default=0.9, least=0, most=1, doc="decay of the running means of squares")
    eps: float = option(default=1e-6, least=0, doc=_EPS)
    weight_decay: float = option(default=0.0, least=0, doc=_DECAYED)


@register("optimizer", "adamax")
class Adamax(TorchOptimizer):
    """Adam with the largest recent gradient of an element in place of the root of its mean square.
    torch.optim.Adamax itself.

    Source: Kingma & Ba 2015, alg. 2 (arXiv:1412.6980).
    """

    torch_class = "torch.optim:Adamax"
    usual_lr = 0.002

    betas: tuple[float, float] = option(
        default=(0.9, 0.999), least=0, below=1, doc="decays of the running mean of gradients and of the largest one"
    )
    eps: float = option(default=1e-8, least=0, doc=_EPS)
    weight_decay: float = option(default=0.0, least=0, doc=_DECAYED)


@register("optimizer", "asgd")
class Asgd(TorchOptimizer):
    """SGD that also keeps the average of the parameters. torch.optim.ASGD itself: it lowers the learning rate that the
    schedule gives, from its second step on. `step.ema` evaluates averages.

    Source: Polyak & Juditsky 1992 (doi.org/10.1137/0330046).
    """

    torch_class = "torch.optim:ASGD"

    lambd: float = option(default=1e-4, least=0, doc="decay of the parameters, and of the learning rate by steps")
    alpha: float = option(default=0.75, least=0, doc="power with which the learning rate falls")
    t0: float = option(default=1e6, least=0, doc="step at which averaging starts", unit="steps")
    weight_decay: float = option(default=0.0, least=0, doc=_DECAYED)


@register("optimizer", "nadam")
class NAdam(TorchOptimizer):
    """Adam that looks ahead along its momentum (Nesterov). torch.optim.NAdam itself.

    Source: Dozat 2016 (openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ).
    """

    torch_class = "torch.optim:NAdam"
    usual_lr = 0.002

    betas: tuple[float, float] = option(default=(0.9, 0.999), least=0, below=1, doc=_BETAS)
    eps: float = option(default=1e-8, least=0, doc=_EPS)
    weight_decay: float = option(default=0.0, least=0, doc=_DECAYED)
    momentum_decay: float = option(default=4e-3, least=0, doc="how fast the momentum grows to the first of betas")
    decoupled_weight_decay: bool = option(default=False, doc=_DECOUPLED)


@register("optimizer", "radam")
class RAdam(TorchOptimizer):
    """Adam that steps by momentum alone until its mean of squares is worth something, in place of a warm-up.
    torch.optim.RAdam itself.

    Source: Liu et al. 2020 (arXiv:1908.03265).
    """

    torch_class = "torch.optim:RAdam"
    usual_lr = 0.001

    betas: tuple[float, float] = option(default=(0.9, 0.999), least=0, below=1, doc=_BETAS)
    eps: float = option(default=1e-8, least=0, doc=_EPS)
    weight_decay: float = option(default=0.0, least=0, doc=_DECAYED)
    decoupled_weight_decay: bool = option(default=False, doc=_DECOUPLED)


@register("optimizer", "rmsprop")
class RMSprop(TorchOptimizer):
    """Divide each element's gradient by the root of its mean square. torch.optim.RMSprop itself.

    Source: Hinton 2012, lecture 6e (cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf).
    """

    torch_class = "torch.optim:RMSprop"
    usual_lr = 0.01

    alpha: float = option(default=0.99, least=0, doc="decay of the running mean of squared gradients")
    eps: float = option(default=1e-8, least=0, doc=_EPS)
    weight_decay: float = option(default=0.0, least=0, doc=_DECAYED)
    momentum: float = option(default=0.0, least=0, doc="share of the last update that is kept; 0 keeps no state of it")
    centered: bool = option(default=False, doc="divide by the standard deviation: take the squared mean off")


@register("optimizer", "rprop")
class Rprop(TorchOptimizer):
    """Steps that know only the signs of gradients, each element with its own size, which begins with the learning rate.
    For steps over all the data. torch.optim.Rprop itself, which has no weight decay.

    Source: Riedmiller & Braun 1993 (doi.org/10.1109/ICNN.1993.298623).
    """

    torch_class = "torch.optim:Rprop"
    usual_lr = 0.01
    takes_weight_decay = False

    etas: tuple[float, float] = option(
        default=(0.5, 1.2), above=0, doc="factors of the step's size after a change of sign, and after none"
    )
    step_sizes: tuple[float, float] = option(default=(1e-6, 50.0), above=0, doc="smallest and largest size of a step")

    def check(self) -> None:
        super().check()
        if not self.etas[0] < 1.0 < self.etas[1]:
            raise ConfigError(f"optimizer.etas={list(self.etas)} must be less than 1, and more than 1, as [0.5, 1.2]")
