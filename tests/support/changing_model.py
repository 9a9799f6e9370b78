"""Models whose forward pass changes buffers, with and without a rule. A plugin.

The kinds of the recipe `changing`. `average`: a running average that the forward pass uses, assigned anew. `rows`: a
counter of rows. `passes`: a counter of passes. `cache`: scratch memory. `spectral`, `siamese`: what is known.
`grows`: a memory of the last rows.
`skipped`: a normalisation that some batches leave out. `late`: a buffer that only some batches change. Normalisations:
`own` has a forward pass of its own that counts and reads its averages; `still` is put into evaluation mode and back
around its call; `momentum` gets another momentum in each pass; `reads` has averages that training reads; `shared` has
those of another; `again` is computed again in the backward pass, as its author says.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from dtf.api.layout import BufferUpdate, Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import Tensor, nn

RULES = {
    "average": {"inner.level": BufferUpdate.mean},
    "rows": {"inner.seen": BufferUpdate.sum},
    "passes": {"inner.*": BufferUpdate.mean},
    "cache": {"inner.cache": BufferUpdate.local},
    "skipped": {"inner.norm": BufferUpdate.mean},
    "own": {"inner.norm": BufferUpdate.mean},
    "reads": {"inner.norm": BufferUpdate.mean},
}
NORMS = ("siamese", "skipped", "own", "reads", "still", "momentum", "shared", "again")


@register("recipe", "changing")
class Changing(Toy):
    kind: str = option(default="average", doc="what changes")
    declared: bool = option(default=True, doc="whether the layout has a rule for it")
    pattern: str = option(default="", doc="another pattern in place of the right one")

    def build_model(self) -> nn.Module:
        return build(self.kind)

    def layout(self, model: nn.Module) -> Layout:
        rules = RULES.get(self.kind, {}) if self.declared else {}
        if self.pattern:
            rules = {self.pattern: BufferUpdate.mean}
        return Layout((("first",), ("inner",), ("last",)), buffers=rules)


def renorm(channels: int) -> nn.BatchNorm1d:
    """Batch renormalisation, written as many have written batch normalisation by hand."""
    import torch
    from torch import nn

    class Renorm(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            assert self.running_mean is not None and self.running_var is not None
            mean, std = self.running_mean, self.running_var.sqrt()
            if not self.training:
                return (input - mean) / std
            factor = 0.0
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
                factor = self.momentum or 0.0
            own_mean, own_std = input.mean(0), (input.var(0) + self.eps).sqrt()
            y = (input - own_mean) / own_std * (own_std.detach() / std).clamp(0.5, 2)
            y = y + ((own_mean.detach() - mean) / std).clamp(-1, 1)
            with torch.no_grad():
                self.running_mean = (1 - factor) * mean + factor * own_mean
                self.running_var.lerp_(own_std**2, factor)
            return y

    return Renorm(channels)


def build(kind: str) -> nn.Module:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(12, 12, bias=kind not in NORMS)  # a normalisation would cancel it
            self.layer = nn.utils.parametrizations.spectral_norm(layer) if kind == "spectral" else layer
            if kind in NORMS:
                self.norm = renorm(12) if kind == "own" else nn.BatchNorm1d(12)
            if kind == "shared":
                self.other = nn.BatchNorm1d(12)
                self.other.running_mean = self.norm.running_mean
            if kind in ("average", "late"):
                self.register_buffer("level", torch.zeros(12))
            if kind == "grows":
                self.register_buffer("rows", torch.zeros(0, 12))
            if kind in ("rows", "passes"):
                self.register_buffer({"rows": "seen"}.get(kind, kind), torch.zeros((), dtype=torch.int64))
            if kind == "cache":
                self.register_buffer("cache", torch.zeros(1, 12), persistent=False)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            if kind == "siamese":
                return torch.relu(self.norm(y)) - torch.relu(self.norm(y.flip(1)))
            if kind == "shared":
                y = self.other(y)
            if kind == "momentum":
                self.norm.momentum = 0.05
            if kind == "reads":
                y = y - self.norm.running_mean
            if kind == "still":
                self.norm.eval()
            if kind == "again":
                return torch.relu(checkpoint(self.norm, y, use_reentrant=False))
            if kind in NORMS and (kind != "skipped" or bool(x.sum() > 0)):
                y = self.norm(y)
            if kind == "still":
                self.norm.train(self.training)
            if self.training and (kind == "average" or (kind == "late" and bool((x.abs() > 0.9).any()))):
                self.level = 0.9 * self.level + 0.1 * y.detach().mean(0)
            if kind in ("average", "late"):
                y = y - self.level
            if kind == "rows" and self.training:
                self.seen += len(x)
                y = y / (1 + 0.01 * self.seen)
            if kind == "passes":
                self.passes += 1
            if kind == "grows" and self.training:
                self.rows = torch.cat([self.rows, y.detach()])
            if kind == "cache":
                self.cache = y.detach()
            return torch.relu(y)

    layers = {"first": nn.Linear(8, 12), "tanh": nn.Tanh(), "inner": Inner(), "last": nn.Linear(12, 4)}
    return nn.Sequential(OrderedDict(layers))
