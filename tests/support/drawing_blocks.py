"""Toys whose blocks draw random numbers without modules of dropout, in ways that a pipeline refuses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtf.api.layout import Layout
from tests.support.toy import Toy


class Careless(Toy):
    """Noise without a module, inside a block."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[4] = Noisy()  # type: ignore[index]
        return model

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0", "1"), ("4",), ("7",), ("9",)))


class Untried(Careless):
    """Dropout in a block, in evaluation alone."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[4] = Tired()  # type: ignore[index]
        return model


class Again(Toy):
    """A block that drops by a function is called once more behind another one."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        return nn.Sequential(*model[:4], drops := Dropping(), model[7], drops, model[9])  # type: ignore[index]

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0", "1"), ("4",), ("5",), ("7",)))


class Tired(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(input), 0.5, not self.training)


class Dropping(Tired):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(input), 0.5, self.training)


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (torch.rand(()) if self.training else 0.0)
