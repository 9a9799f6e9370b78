"""Models that reach past what a pass is given: for gradients, for copies of themselves, for other processes, for state
that acts once or in the backward pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entries import cross_entropy, vectors, zoo_model

CLASSES = 4
_made: dict[str, nn.Module] = {}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def _with_decay(outputs: Tensor, targets: Tensor) -> Tensor:
    model = _made["decayed"]
    assert isinstance(model, TwoLayers)
    return functional.cross_entropy(outputs, targets, reduction="none") + 0.01 * model.first.weight.square().sum()


@zoo_model(
    "weights_by_a_global",
    vectors(),
    _with_decay,
    "loss",
    "global variable",
    may={"dp": "hidden state", "fsdp": "layout"},
)
class Decayed(TwoLayers):
    """Its loss reads its weights through a name of the Python module."""

    def __init__(self) -> None:
        super().__init__()
        _made["decayed"] = self


@zoo_model("gradients_cleared", vectors(), cross_entropy, "state", may={"*": "hidden state"})
class Clears(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().forward(x)


@zoo_model("gradients_read", vectors(), cross_entropy, "state", may={"*": "hidden state"})
class Reads(TwoLayers):
    """Gates by the gradient so far, as sparse training does."""

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.first.weight.grad
        y = super().forward(x)
        return y if gradient is None or not self.training else y * (1 + gradient.norm().detach())


@zoo_model("backward_inside", vectors(), cross_entropy, "autograd", may={"*": "hidden state"})
class Adversarial(TwoLayers):
    """Moves rows against the gradient of a pass of its own, and leaves that in the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not torch.is_grad_enabled():
            return super().forward(x)
        moved = x.detach().requires_grad_()
        super().forward(moved).square().sum().backward()
        assert moved.grad is not None
        return super().forward(x + 0.1 * moved.grad.sign())


@zoo_model("processes_in_a_hook", vectors(), cross_entropy, "autograd", may={"*": "layout"})
class Averages(TwoLayers):
    """Divides a gradient by the number of processes, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda g: g / (dist.get_world_size() if dist.is_initialized() else 1))


class Counted(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.passes, self.part, self.seen = 0, 1.0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.part *= 0.9
            self.seen.append(1)
        return super().forward(x) * self.factor()

    def factor(self) -> float:
        return 1.0


@zoo_model("acts_in_one_pass", vectors(), cross_entropy, "state", "hidden state", "attribute")
class Once(Counted):
    """Does something in its 40th pass, and in no other."""

    def factor(self) -> float:
        return 3.0 if self.training and self.passes == 40 else 1.0


@zoo_model("acts_below_a_bound", vectors(), cross_entropy, "state", "hidden state", "attribute")
class Shrinks(Counted):
    """A number that each pass makes smaller by a factor."""

    def factor(self) -> float:
        return 2.0 if self.part < 0.001 else 1.0


@zoo_model("acts_by_a_length", vectors(), cross_entropy, "state", "hidden state", "attribute")
class Lengthens(Counted):
    """A list that each pass makes longer."""

    def factor(self) -> float:
        return 2.0 if len(self.seen) > 60 else 1.0


class _Turns(torch.autograd.Function):
    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _Turns.passes += 1
        return -gradient if _Turns.passes > 60 else gradient


@zoo_model("turns_gradients_late", vectors(), cross_entropy, "state", "hidden state", "attribute")
class Turns(TwoLayers):
    """From some pass on its gradients have another sign: their norms stay."""

    def __init__(self) -> None:
        super().__init__()
        _Turns.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Turns.apply(torch.relu(self.first(x))))


@zoo_model("own_equality", vectors(), cross_entropy, "structure", may={"fsdp": "layout"})
class Equal(TwoLayers):
    """Says itself what it is equal to."""

    def __eq__(self, other: object) -> Any:
        return self.first.weight == other

    __hash__ = nn.Module.__hash__


@zoo_model("own_parameters", vectors(), cross_entropy, "structure", refused={"*": "non-real parameters"})
class Tells(TwoLayers):
    """Shows its optimizer the last layer alone."""

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return ((name, p) for name, p in super().named_parameters(*args, **options) if name.startswith("last"))


@zoo_model("holds_itself", vectors(), cross_entropy, "structure")
class HoldsItself(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {"model": self}
        self.held["held"] = self.held

    def forward(self, x: Tensor) -> Tensor:
        return TwoLayers.forward(self.held["held"]["model"], x)


@zoo_model("made_in_evaluation", vectors(), cross_entropy, "structure", may={"fsdp": "layout"})
class MadeInEvaluation(TwoLayers):
    """The first evaluation keeps a copy of a layer as it is then."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        if not hasattr(self, "kept"):
            self.kept = copy.deepcopy(self.last)
        return self.kept(torch.relu(self.first(x)))
