"""Frozen parts of a model: their parameters get no gradient, and their batch statistics stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn

from dtf.api.name_patterns import covered


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that the patterns cover, and the batch normalisation among them; in place.

    A normalisation layer whose own parameters are all frozen, or that is named itself or lies in what is named,
    normalises with the running averages it came with, in training too: averages that follow the new data would change
    what frozen layers compute.
    """
    if not patterns:
        return
    for name, parameter in model.named_parameters():
        if covered(patterns, name):
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            parameters = list(module.parameters(recurse=False))
            if covered(patterns, name) or (parameters and not any(parameter.requires_grad for parameter in parameters)):
                stay_in_evaluation(module)


def stay_in_evaluation(module: nn.Module) -> None:
    """Keep a module in evaluation mode, whatever mode the model is put into; in place. Modules in it are left alone.

    Its class changes, the module and its name stay, as with seeded dropout in `dtf.model.seeded_dropout`.
    """
    if not isinstance(module, _Frozen):
        module.__class__ = _frozen(type(module))
    module.training = False


@cache
def _frozen(kind: type) -> Any:
    return type(f"Frozen{kind.__name__}", (_Frozen, kind), {"__module__": kind.__module__})


class _Frozen(nn.Module):
    """A module that stays in evaluation mode."""

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self.training = False
        return self
