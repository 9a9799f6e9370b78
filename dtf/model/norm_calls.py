"""Calls of normalisations with running averages: how many changed the averages, and in which mode."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

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
        self.log: list[bool] = []
        """The calls of a compiled pass, by whether they change the averages: it cannot count."""
        self.weight: Tensor | None = None
        """`momentum` as a tensor (), which a compiled pass reads; None: the layer is in no compiled module."""
        self.weighs: float | None = None
        """The value of `weight`."""
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
    _calls: Calls

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
        calls = self._calls
        # not is_compiling(), which is true in all threads while one compiles
        if torch.compiler.is_dynamo_compiling() and calls.weight is not None:
            return self._compiled(input, calls)
        calls.note(self.momentum, self.training and self.track_running_stats)  # type: ignore[attr-defined]
        calls.inside = True
        try:
            return super().forward(input)  # type: ignore[misc]
        finally:
            calls.inside = False

    def _compiled(self, input: Tensor, calls: Calls) -> Tensor:
        """As torch's own forward, with a momentum that changes from call to call, and nothing counted."""
        norm: Any = self
        norm._check_input_dim(input)
        learns = norm.training and norm.track_running_stats
        calls.log.append(learns)
        if not norm.training:
            kept = norm.running_mean, norm.running_var
            return batch_norm(input, *kept, norm.weight, norm.bias, False, 0.0, norm.eps)
        if not learns:
            return batch_norm(input, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
        output = batch_norm(input, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)  # they are the batch's now
        weight: Any = calls.weight
        for running, statistic in ((norm.running_mean, mean), (norm.running_var, var)):
            running.mul_(1 - weight).add_(statistic * weight)
        return output

    def ready_for_compilation(self) -> str:
        """Why the layer cannot be in a compiled module; empty: it can, from now on."""
        norm: Any = self
        if not isinstance(self, nn.modules.batchnorm._BatchNorm):
            return "an instance normalisation in it keeps running averages"
        norm._calls.weight = torch.zeros((), dtype=norm.running_mean.dtype, device=norm.running_mean.device)
        return ""

    def before_compiled(self) -> None:
        """Called before a pass of the compiled module that has this layer."""
        norm: Any = self
        calls, momentum = norm._calls, norm.momentum or 0.0
        if calls.weighs != momentum:
            calls.weight.fill_(momentum)
            calls.weighs = momentum

    def after_compiled(self) -> None:
        """Called after that pass: count its calls."""
        norm: Any = self
        calls = norm._calls
        for learns in calls.log:
            calls.note(norm.momentum, learns)
        calls.log.clear()


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
    module.__class__ = _counted(type(module))
    module.__dict__["_calls"] = Calls(module.momentum)  # type: ignore[arg-type]


@cache
def _counted(kind: type) -> Any:
    """One class for all layers of a kind: what is compiled for one serves all."""
    return type(kind.__name__, (Counted, kind), {"__module__": kind.__module__})


def goes_its_own_way(layer: nn.Module, base: float | None) -> bool:
    """Whether passes so far called a layer, but never in training mode, or set its momentum."""
    calls = calls_of(layer)
    return calls.sets_momentum or bool(calls.made and not calls.learning and base != 0.0)
