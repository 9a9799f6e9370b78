"""How models are put together: shared, unused and frozen parts, lists and dicts, loops, compiled parts."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.entries import cross_entropy, images, regression, squared_error, vectors, zoo_model

CLASSES = 4


@zoo_model("shared_module", vectors(), cross_entropy, "shared", "calls")
class SharedModule(nn.Module):
    """One block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.b(torch.relu(self.a(torch.relu(self.first(x)))))))


@zoo_model("shared_parameter", vectors(), cross_entropy, "shared", "tied")
class SharedParameter(nn.Module):
    """An autoencoder's weight, used both ways, and one bias of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mix, self.head = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(8, CLASSES)
        self.mix.bias = self.encode.bias

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.mix(torch.tanh(self.encode(x))))
        return self.head(F.linear(h, self.encode.weight.t()))


@zoo_model("called_n_times", vectors(), cross_entropy, "shared", "calls")
class Loop(nn.Module):
    """One block, called as often as the rows of the micro-batch ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(1 + int((x[:, 0] > 0).sum()) % 3):
            h = h + torch.tanh(self.block(h))
        return self.last(h)


@zoo_model("unused_parameters", vectors(), cross_entropy, "unused")
class Unused(nn.Module):
    """A layer that no pass uses, and a parameter that only evaluation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.only_eval = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(torch.relu(self.first(x)))
        return out if self.training else out * self.only_eval


@zoo_model(
    "sometimes_unused",
    vectors(),
    cross_entropy,
    "unused",
    "unused in a step",
    "data-dependent",
    may={"fsdp": "uneven use"},
)
class Branch(nn.Module):
    """A branch that the rows of the micro-batch choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(*s) for s in ((8, 12), (12, 12), (12, 12), (12, CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(torch.relu(self.a(h) if x.sum() > 0 else self.b(h)))


@zoo_model("frozen_half", vectors(), cross_entropy, "frozen")
def frozen_half() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, CLASSES))
    for part in (model[0], model[3]):
        part.requires_grad_(False)
    return model


@zoo_model("detached_half", vectors(), cross_entropy, "frozen", "unused")
class Detached(nn.Module):
    """Parameters want gradients, but a no_grad block gives them none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.relu(self.body(x))
        return self.head(h)


@zoo_model("lists_and_dicts", vectors(), cross_entropy, "containers")
class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 12) / 3)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(12)), "b": nn.Parameter(torch.zeros(()))})
        self.parts = nn.ModuleDict({"relu": nn.ReLU(), "last": nn.Linear(12, CLASSES)})
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.gains[0]) @ self.gains[1] + self.shifts["a"] * self.shifts["b"]
        for layer in self.layers:
            h = self.parts["relu"](layer(h))
        return self.parts["last"](h)


zoo_model("deep", vectors(), cross_entropy, "depth")(
    lambda: nn.Sequential(
        *(layer for i in range(4) for layer in (nn.Linear(8 if i == 0 else 12, 12), nn.Tanh())), nn.Linear(12, CLASSES)
    )
)
zoo_model("very_deep", vectors(), cross_entropy, "depth")(
    lambda: nn.Sequential(
        nn.Linear(8, 6), *(layer for _ in range(60) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, CLASSES)
    )
)
zoo_model("one_number", regression(), squared_error, "parameters")(lambda: _Gain())
zoo_model("no_bias_conv", images(), cross_entropy, "plain")(
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, bias=False),
        nn.BatchNorm2d(8),
        nn.PReLU(),
        nn.Conv2d(8, 8, 3, 2, groups=8),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
)


class _Gain(nn.Module):
    """One parameter for the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(1, keepdim=True) * self.gain).expand(-1, 1)


@zoo_model("channels_last", images(), cross_entropy, "memory format")
def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@zoo_model("checkpointed", vectors(), cross_entropy, "checkpoint", "draws")
class Checkpointed(nn.Module):
    """Activations of two blocks are computed again in the backward pass, with dropout in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2))
        self.b, self.last = nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.a, x, use_reentrant=False)
        return self.last(checkpoint(self.b, h, use_reentrant=False))


@zoo_model("checkpointed_reentrant", vectors(), cross_entropy, "checkpoint")
class Reentrant(nn.Module):
    """The older kind, which runs a backward pass inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = (
            nn.Linear(8, 12),
            nn.Sequential(nn.Linear(12, 12), nn.Tanh()),
            nn.Linear(12, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=True))


@zoo_model("compiled_part", vectors(), cross_entropy, "compile", slow=True)
class CompiledPart(nn.Module):
    """One layer through torch.compile, with the backend that needs no compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.fast = torch.compile(self.first, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.fast(x)))


@zoo_model("scripted_part", vectors(), cross_entropy, "compile")
class ScriptedPart(nn.Module):
    """A part through torch.jit.script."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.act = torch.jit.script(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


@zoo_model("in_place", vectors(), cross_entropy, "plain")
class InPlace(nn.Module):
    """Activations are changed in place, as memory savers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(8, 12), nn.Linear(12, CLASSES), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += 0.1
        h[:, 0] = 0.0
        h = self.act(h)
        return self.last(h)


@zoo_model("inputs_in_place", vectors(), cross_entropy, "plain")
class InputsInPlace(nn.Module):
    """The author scales the batch itself, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).sub_(0.1)
        return self.last(x)
