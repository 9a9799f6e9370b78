"""Hooks that a model's author put on parameters, under FSDP: they see the gathered gradient, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Hooks(NamedTuple):
    """Of one parameter."""

    gradient: list[Callable[..., Any]]  # `register_hook`
    accumulated: list[Callable[..., Any]]  # `register_post_accumulate_grad_hook`


def parameter_hooks(model: nn.Module) -> dict[str, Hooks]:
    """The hooks of each parameter that has some, by name."""
    found = {
        name: Hooks(
            [*(getattr(parameter, "_backward_hooks", None) or {}).values()],
            [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()],
        )
        for name, parameter in model.named_parameters()
    }
    return {name: hooks for name, hooks in found.items() if hooks.gradient or hooks.accumulated}


def hook_gathered(model: nn.Module, hooks: dict[str, Hooks]) -> None:
    """Give the gathered parameters of a sharded model the hooks of those before. Collective where there are some."""
    if not hooks:
        return
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    for name, of_parameter in hooks.items():
        parameter = model.get_parameter(name)
        for hook in of_parameter.gradient:
            parameter.register_hook(hook)
        for hook in of_parameter.accumulated:
            parameter.register_post_accumulate_grad_hook(hook)
    for unit in units:
        unit.reshard()
