"""Calls of normalisations with running averages: how many changed the averages, and in which mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError


class Calls:
    """What passes did with one normalisation."""

    def __init__(self, momentum: float | None) -> None:
        self.momentum = momentum
        """As dtf has set it."""
        self.sets_momentum = False
        """Whether the forward pass of the model sets another."""
        self.made, self.learning = 0, 0
        """Calls, and those that changed its averages: not those of padding or of computing again."""
        self.steps, self.called = 0, False
        """How many steps were taken before this one, and whether this pass has changed the averages."""
        self.inside = False
        """Whether torch's own forward pass runs, which is not to count."""
        self.elsewhere = False
        """Whether another process counts the steps, so that in evaluations their number is not known here."""

    def note(self, momentum: float | None, learns: bool) -> None:
        self.made += 1
        if learns and momentum != 0.0:
            self.learning += 1
            self.called = True
            self.sets_momentum |= momentum != self.momentum

    def begin(self, steps: int) -> None:
        self.steps, self.called = steps, False


class Counted:
    """A normalisation with the forward pass of torch, whose calls are counted."""

    training: bool

    @property
    def num_batches_tracked(self) -> Tensor | None:
        """Steps, as in checkpoints: a pass counts once, whichever micro-batch of its step it is."""
        calls = self.__dict__["_calls"]
        if calls.elsewhere and not self.training and not calls.inside:
            raise ConfigError(
                "the forward pass of an evaluation reads num_batches_tracked of a normalisation, which trainers do not "
                "know; use strategy=ddp"
            )
        return None if calls.inside else torch.tensor(calls.steps + calls.called)

    def forward(self, input: Tensor) -> Tensor:
        calls = self.__dict__["_calls"]
        calls.note(self.momentum, self.training and self.track_running_stats)  # type: ignore[attr-defined]
        calls.inside = True
        try:
            return super().forward(input)  # type: ignore[misc]
        finally:
            calls.inside = False


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_FORWARDS = (nn.modules.batchnorm._BatchNorm.forward, nn.modules.instancenorm._InstanceNorm.forward, Counted.forward)


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is a batch or instance normalisation with the forward pass of torch. What an author's own does
    with its buffers, its counter and its momentum is not known: its buffers are like all others.
    """
    return isinstance(module, _NORMS) and type(module).forward in _FORWARDS and "forward" not in vars(module)


def calls_of(layer: nn.Module) -> Calls:
    return vars(layer)["_calls"]


def count_calls_of(module: nn.Module) -> None:
    """Count the calls of a normalisation from now on. The class changes, the module and its name stay, as with seeded
    dropout.
    """
    if isinstance(module, Counted):
        return
    kind: Any = type(type(module).__name__, (Counted, type(module)), {"__module__": type(module).__module__})
    module.__class__ = kind
    module.__dict__["_calls"] = Calls(module.momentum)  # type: ignore[arg-type]


def goes_its_own_way(layer: nn.Module, base: float | None) -> bool:
    """Whether passes so far called a layer, but never in training mode, or set its momentum."""
    calls = calls_of(layer)
    return calls.sets_momentum or bool(calls.made and not calls.learning and base != 0.0)
