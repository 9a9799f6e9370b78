"""Models as people publish them, whose pass does what few do: losses inside, rounding, loops that rows decide."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, vectors, zoo_model

CLASSES, BOUND = 4, 2.0


def _labelled(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    x, y = vectors()(rows, generator)
    return {"x": x, "labels": y}, y


@zoo_model("loss_inside", _labelled, lambda out, y: out["loss"], "strangers", "scalar")
class LossInside(nn.Module):
    """Computes its loss itself, as those of a well-known hub do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.last(torch.relu(self.first(batch["x"])))
        return {"loss": F.cross_entropy(logits, batch["labels"]), "logits": logits}


def _moved(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets.add_(1).remainder_(CLASSES))


@zoo_model("writes_into_its_rows", vectors(), _moved, "strangers")
class Writes(nn.Module):
    """Changes inputs in place, and its loss targets, each time to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.mul_(0.5).add_(0.1))))


def _balanced(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = outputs
    return cross_entropy(logits, targets) + 0.01 * balance


@zoo_model(
    "router_with_capacity",
    vectors(),
    _balanced,
    "strangers",
    "rows coupled",
    "unused in a step",
    may={"fsdp": "uneven use"},
)
class Router(nn.Module):
    """Experts take at most so many rows of a micro-batch; a loss that balances them is for all rows together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.first, self.head = nn.Linear(12, 3, bias=False), nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        weight = self.gate(h).softmax(-1)
        best, chosen = weight.max(-1)
        out = h.clone()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:2, 0]
            if rows.numel():
                out[rows] = h[rows] + best[rows, None] * expert(h[rows])
        share = F.one_hot(chosen, 3).to(weight).mean(0)
        return self.head(out), 3 * (share * weight.mean(0)).sum()


@zoo_model("pondering", vectors(), cross_entropy, "strangers", "data-dependent", "calls", may={"fsdp": "uneven use"})
class Pondering(nn.Module):
    """One cell, called until the rows of the micro-batch say stop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 12), nn.GRUCell(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        h = torch.zeros_like(x)
        for _ in range(1 + int(x.detach().sum().abs() * 4) % 4):
            h = self.cell(x, h)
        return self.last(h)


@zoo_model(
    "temperature", vectors(16), cross_entropy, "strangers", refused={"divided": "hidden state", "pipeline": "layout"}
)
class Temperature(nn.Module):
    """Keeps a learned scale within bounds in each pass, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        self.classes = nn.Parameter(torch.randn(CLASSES, 6))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0, BOUND)
        a, b = x.chunk(2, 1)
        joined = F.normalize(self.left(a) * self.right(b), dim=-1)
        return self.scale.exp() * joined @ F.normalize(self.classes, dim=-1).t()


@zoo_model("ensemble", vectors(), cross_entropy, "strangers")
class Ensemble(nn.Module):
    """Three nets in one call of vmap over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(0.3 * torch.randn(3, *s)) for s in ((12, 8), (CLASSES, 12))])

    def forward(self, x: Tensor) -> Tensor:
        def net(a: Tensor, b: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, a)), b)

        return torch.vmap(net)(*self.weights).mean(0)


@zoo_model("fixed_projection", vectors(), cross_entropy, "strangers")
class FixedProjection(nn.Module):
    """Draws the same projection in each pass, from a generator that it seeds there."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        projection = torch.randn(8, 12, generator=torch.Generator().manual_seed(7)).to(x)
        return self.last(torch.cos(x @ projection))


def _adaptive(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return -outputs[0]


@zoo_model("adaptive_softmax", _labelled, _adaptive, "strangers", "unused in a step", may={"fsdp": "uneven use"})
class AdaptiveSoftmax(nn.Module):
    """Rare classes have a cluster of their own, which is computed where rows fall into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.softmax = nn.Linear(8, 12), nn.AdaptiveLogSoftmaxWithLoss(12, CLASSES, [2], div_value=2.0)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = self.softmax(torch.relu(self.first(batch["x"])), batch["labels"])
        return out.output, out.loss


@zoo_model(
    "quantisation_aware",
    vectors(),
    cross_entropy,
    "strangers",
    "buffers",
    "changes in evaluation",
    "narrow",
    may={"divided": "hidden state"},
    precision="fp32",
)
class QuantisationAware(nn.Module):
    """Weights and activations rounded to eight bits as if; observers keep what they saw in buffers."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.watch = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.watch(torch.relu(self.first(x))))


zoo_model(
    "quantisation_aware_declared",
    vectors(),
    cross_entropy,
    "strangers",
    "buffers",
    "narrow",
    buffers={"watch.*": "mean"},
    precision="fp32",
)(QuantisationAware)


@zoo_model("narrow_inside", vectors(), cross_entropy, "strangers", "narrow", precision="fp32")
class NarrowInside(nn.Module):
    """Switches to bfloat16 for a part, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.middle(h)
        return self.last(torch.relu(h.to(x)))
