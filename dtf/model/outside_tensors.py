"""Tensors that learn in an author's mind only: they need a gradient, and are no parameters of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.attributes import DEPTH, holders
from dtf.model.object_fields import fields_of, has_fields

_MOST_ITEMS = 1000
"""Of a container in which tensors are looked for: a longer one is data."""


class OutsideTensors:
    """Leaf tensors that need a gradient, which the modules of a model or its recipe hold past its parameters."""

    def __init__(self, model: nn.Module, recipe: object) -> None:
        seen = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers(), recipe)}
        found = [
            each
            for prefix, holder in holders(model, recipe)
            for key, value in list(vars(holder).items())
            for each in _inside(f"{prefix}.{key}" if prefix else key, value, seen, DEPTH)
        ]
        self._tensors = [(name, tensor, tensor.grad) for name, tensor in found]

    def learning(self) -> list[str]:
        """Names of those that a backward pass has come to since; their gradients are dropped."""
        names = [name for name, tensor, before in self._tensors if tensor.grad is not before]
        for _, tensor, before in self._tensors:
            tensor.grad = before
        return names


def refuse_held(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a parameter that a plain attribute holds too: `strategy` puts something else into its
    module, and what is held would stay as it is.
    """
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {id(part) for part in (*model.modules(), *model.buffers())}
    for prefix, holder in holders(model, None):
        kept = (*_REGISTERED, "_flat_weights") if isinstance(holder, nn.RNNBase) else _REGISTERED  # torch's own list
        plain = ((key, value) for key, value in vars(holder).items() if key not in kept)
        for key, value in list(plain):
            for name, tensor in _inside(f"{prefix}.{key}" if prefix else key, value, set(seen), DEPTH):
                if id(tensor) in own:
                    raise ConfigError(
                        f"{strategy}: the parameter {own[id(tensor)]} is kept in {name} too, where it would not be "
                        "divided; read it from its module in the forward pass, or use strategy=ddp"
                    )


_REGISTERED = ("_parameters", "_modules", "_buffers")


def outside_error(name: str) -> ConfigError:
    return ConfigError(
        f"the loss depends on {name}, which needs a gradient and is no parameter of the model, so that nothing updates "
        "it. Make it part of what build_model() returns (nn.Parameter, nn.ParameterList, nn.ModuleList; a loss that "
        "learns is a module of the model, and gets its outputs), or call requires_grad_(False) where it is to stay"
    )


def _inside(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen or depth == 0:
        return
    if isinstance(value, Tensor):
        if value.is_leaf and value.requires_grad:
            seen.add(id(value))
            yield name, value
        return
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, nn.Module):
        inner, form = [*value.named_parameters()], ".{}"
    elif isinstance(value, dict):
        inner, form = [*value.items()], "[{!r}]"
    elif isinstance(value, list | tuple | set | deque):
        inner, form = [*enumerate(value)] if len(value) <= _MOST_ITEMS else [], "[{}]"
    elif has_fields(value):
        inner, form = [*fields_of(value).items()], ".{}"
    if not inner or len(inner) > _MOST_ITEMS:
        return
    seen.add(id(value))
    for key, item in inner:
        yield from _inside(name + form.format(key), item, seen, depth - 1)
