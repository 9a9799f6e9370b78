"""Models whose forward pass does something by itself that strategies have to know. A plugin.

The kinds of the recipe `passes`. `reentrant`: blocks with dropout, computed again by torch.utils.checkpoint. `vmap`:
nets in one call over stacked weights. `head_first`: modules defined in another order than that of their use, as
`skips`, which leaves one out in evaluation. `listed`, `closure`, `penalty`: reach a parameter past its module. `alias`,
`tied_data`: use its memory. `adds`: a hook adds to a gradient. `bounded`: keeps a parameter within bounds, out of
autograd's sight. `moved`: gives a parameter other memory. `on_sums`: a hook runs
when a gradient was added. `root_hook`: one of the whole model. `hooked`: one of a gradient. `held`: a parameter in a
list, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import Tensor, nn


@register("recipe", "passes")
class Passes(Toy):
    kind: str = option(default="reentrant", doc="what the forward pass does")

    least: float = option(default=0.0, doc="of kind bounded")
    largest: float = option(default=2.0, doc="of kind bounded")

    def build_model(self) -> nn.Module:
        if self.kind == "bounded":
            return _bounded(self.least, self.largest)
        if self.kind == "adds":
            return _adds(super().build_model())
        if self.kind in ("root_hook", "hooked", "held"):
            return _hooked(super().build_model(), self.kind)
        if self.kind == "moved":
            return _moved()
        if self.kind == "on_sums":
            return _on_sums(super().build_model())
        if self.kind == "unused":
            return _unused(_head_first(skips=False))
        if self.kind in ("head_first", "skips"):
            return _head_first(self.kind == "skips")
        if self.kind in ("listed", "closure", "penalty", "alias", "tied_data"):
            return _past_its_module(self.kind)
        return {"reentrant": _reentrant, "vmap": _vmap}[self.kind]()

    def layout(self, model: nn.Module) -> Layout:
        return super().layout(model) if self.kind in ("on_sums", "root_hook", "hooked", "held") else Layout()


def _reentrant() -> nn.Module:
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
            self.block = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.3))

        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            return self.last(h + (checkpoint(self.block, h, use_reentrant=True) if self.training else self.block(h)))

    return Again()


def _adds(model: nn.Module) -> nn.Module:
    next(model.parameters()).register_hook(lambda gradient: gradient + 1e-3)
    return model


def _unused(model: nn.Module) -> nn.Module:
    """With a layer that no pass uses, whose gradients have a hook."""
    from torch import nn

    model.extra = nn.Linear(3, 3)
    model.extra.weight.register_hook(lambda gradient: gradient * 2 + 1)
    return model


def _head_first(skips: bool) -> nn.Module:
    import torch
    from torch import nn

    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.mid = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Any:
            h = torch.relu(self.first(x))
            return self.last(h if skips and not self.training else torch.relu(self.mid(h)))

    return HeadFirst()


def _past_its_module(kind: str) -> nn.Module:
    from torch import nn
    from torch.nn import functional as F

    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4)
            weight = self.mid.weight
            self.kept: Any = None
            if kind == "listed":
                self.kept = [weight]
            elif kind == "closure":
                self.kept = lambda: weight
            elif kind == "penalty":
                self.kept = list(self.parameters())
            elif kind == "alias":
                self.kept = weight.data
            else:
                self.other = nn.Linear(12, 12)
                self.other.weight.data = weight.data

        def forward(self, x: Tensor) -> Any:
            h = self.mid(self.first(x))
            if kind == "tied_data":
                return self.last(self.other(h))
            if kind == "penalty":
                return self.last(h) * sum(p.square().sum() for p in self.kept)
            weight = {"listed": lambda: self.kept[0], "closure": self.kept, "alias": lambda: self.kept}[kind]()
            return self.last(F.linear(h, weight))

    return Past()


def _vmap() -> nn.Module:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Nets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Parameter(0.3 * torch.randn(3, *s)) for s in ((12, 8), (4, 12)))

        def forward(self, x: Tensor) -> Any:
            nets = torch.vmap(lambda first, last: F.linear(torch.tanh(F.linear(x, first)), last))
            return nets(self.first, self.last).mean(0)

    return Nets()


def _bounded(least: float, largest: float) -> nn.Module:
    import torch
    from torch import nn

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: Tensor) -> Any:
            self.scale.data.clamp_(least, largest)
            return self.scale * self.layer(x)

    return Bounded()


def _moved() -> nn.Module:
    from torch import nn
    from torch.nn.functional import normalize

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            self.layer.weight.data = normalize(self.layer.weight.data)
            return self.layer(x)

    return Moved()


def _on_sums(model: nn.Module) -> nn.Module:
    model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))  # type: ignore
    return model


def _hooked(model: nn.Module, kind: str) -> nn.Module:
    if kind == "root_hook":
        model.register_forward_hook(lambda module, inputs, output: output * 2)  # type: ignore
    elif kind == "hooked":
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore
    else:
        model[7].kept = [model[0].weight]  # type: ignore
    return model
