"""Odd buffers, parameters and attributes that the forward pass leaves alone."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entries import cross_entropy, vectors, zoo_model

CLASSES = 4


class Odd(nn.Module):
    """A net of two layers; subclasses add what is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.add()

    def add(self) -> None:
        pass

    def odd(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.odd(self.first(x))))


@zoo_model("odd_buffers", vectors(), cross_entropy, "buffers")
class OddBuffers(Odd):
    """Of ints, bools, no elements, no axis, None, not saved."""

    def add(self) -> None:
        buffers: dict[str, Tensor | None] = {
            "order": torch.randperm(12),
            "mask": torch.rand(12) > 0.2,
            "empty": torch.empty(0, 3),
            "scale": torch.tensor(1.5),
            "nothing": None,
            "bytes": torch.arange(12, dtype=torch.uint8),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.register_buffer("scratch", torch.linspace(0.5, 1.5, 12), persistent=False)

    def odd(self, h: Tensor) -> Tensor:
        return h[:, self.order] * self.mask * self.scale * self.scratch


@zoo_model(
    "complex_buffer", vectors(), cross_entropy, "buffers", refused={"*": "non-real parameters"}, precision="fp32"
)
class ComplexBuffer(Odd):
    def add(self) -> None:
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.linspace(0, math.pi, 6)))

    def odd(self, h: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(h.view(len(h), 6, 2)) * self.turn).flatten(1)


@zoo_model("aliased_buffer", vectors(), cross_entropy, "buffers", refused={"fsdp": "layout", "pserver": "layout"})
class Aliased(Odd):
    """A buffer that is a view of a parameter's memory."""

    def add(self) -> None:
        self.register_buffer("seen", self.first.weight.detach())

    def odd(self, h: Tensor) -> Tensor:
        return h + self.seen.mean()


@zoo_model("assigned_buffer", vectors(), cross_entropy, "buffers")
class Assigned(Odd):
    """Made empty, and filled later in the constructor, as torchvision's Swin does."""

    def add(self) -> None:
        self.register_buffer("index", torch.zeros(12, dtype=torch.long))
        self.table = nn.Parameter(torch.randn(5))
        self.index = torch.arange(12) % 5

    def odd(self, h: Tensor) -> Tensor:
        return h + self.table[self.index]


@zoo_model("shared_buffer", vectors(), cross_entropy, "buffers")
class SharedBuffer(Odd):
    """One tensor under two names."""

    def add(self) -> None:
        value = torch.rand(12)
        self.register_buffer("one", value)
        self.register_buffer("two", value)

    def odd(self, h: Tensor) -> Tensor:
        return h * self.one + self.two


@zoo_model("zero_size_parameter", vectors(), cross_entropy, "parameters")
class ZeroSize(Odd):
    """A layer without inputs: its weight has no elements."""

    def add(self) -> None:
        self.none = nn.Linear(0, 12)

    def odd(self, h: Tensor) -> Tensor:
        return h + self.none(h[:, :0])


@zoo_model("scalar_parameter", vectors(), cross_entropy, "parameters")
class Scalar(Odd):
    """Parameters of no axis: a gain and a temperature."""

    def add(self) -> None:
        self.gain, self.temperature = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones([]) * math.log(1 / 0.5))

    def odd(self, h: Tensor) -> Tensor:
        return h * self.gain * self.temperature.exp()


@zoo_model("complex_parameter", vectors(), cross_entropy, "parameters", refused={"*": "non-real parameters"})
class Complex(Odd):
    def add(self) -> None:
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.cfloat))

    def odd(self, h: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(h.view(len(h), 6, 2)) * self.turn).flatten(1)


@zoo_model(
    "mixed_formats", vectors(), cross_entropy, "parameters", refused={"*": "non-real parameters"}, precision="fp32"
)
class Mixed(Odd):
    """A part in double precision by its author's choice."""

    def add(self) -> None:
        self.wide = nn.Linear(12, 12).double()

    def odd(self, h: Tensor) -> Tensor:
        return self.wide(h.double()).to(h)


@zoo_model("lazy", vectors(), cross_entropy, "lazy", refused={"*": "non-real parameters"})
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES))


@zoo_model("lazy_made", vectors(), cross_entropy, "lazy")
def lazy_made() -> nn.Module:
    """The author runs a batch through it at once."""
    model = nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, 8))
    return model


@zoo_model("tensor_attribute", vectors(), cross_entropy, "attribute")
class TensorAttribute(Odd):
    """Plain tensors as attributes, one of them in a list."""

    def add(self) -> None:
        self.t = torch.arange(12)
        self.parts = [torch.ones(12), torch.linspace(0, 1, 12)]

    def odd(self, h: Tensor) -> Tensor:
        return h[:, self.t.flip(0)] + self.parts[0].to(h) * self.parts[1].to(h)


@zoo_model("drawn_attribute", vectors(), cross_entropy, "attribute")
class DrawnAttribute(Odd):
    """A random projection in a plain attribute, drawn by the constructor."""

    def add(self) -> None:
        self.projection = torch.randn(12, 12) / 12**0.5

    def odd(self, h: Tensor) -> Tensor:
        return h @ self.projection.to(h)


@zoo_model("drawn_by_numpy", vectors(), cross_entropy, "attribute")
class DrawnByNumpy(Odd):
    """Initial values from numpy and from Python's random."""

    def add(self) -> None:
        import random

        import numpy as np

        self.mix = nn.Parameter(torch.from_numpy(np.random.randn(12, 12).astype(np.float32)) / 4)
        self.keep = random.sample(range(12), 9)

    def odd(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        out[:, self.keep] = (h @ self.mix)[:, self.keep]
        return out


@zoo_model("constructor_reads_numbers", vectors(), cross_entropy, "attribute")
class ReadsNumbers(Odd):
    """The constructor looks at values of tensors, as schedules of stochastic depth do."""

    def add(self) -> None:
        rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        self.scales = [1 - rate for rate in rates]
        with torch.no_grad():
            self.first.weight /= float(self.first.weight.norm())

    def odd(self, h: Tensor) -> Tensor:
        return h * self.scales[1]


@zoo_model("extra_state", vectors(), cross_entropy, "attribute")
class ExtraState(Odd):
    """State of its own in the state dict, constant while training."""

    def add(self) -> None:
        self.version = 3

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]
