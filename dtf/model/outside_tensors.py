"""Tensors that learn in an author's mind only: they need a gradient, and are no parameters of the model."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.distributed.sharding import is_dtensor
from dtf.model.attributes import DEPTH, holders
from dtf.model.object_fields import fields_of, has_fields
from dtf.model.shared_state import shared_holders

_MOST_ITEMS = 1000
"""Of a container in which tensors are looked for: a longer one is data."""


class OutsideTensors:
    """Leaf tensors that need a gradient and are no parameters of a model: those that its modules or its recipe hold,
    and those of the graphs that `look` is shown.
    """

    def __init__(self, model: nn.Module, recipe: object) -> None:
        self._model = model
        self._own = {id(parameter) for parameter in model.parameters()}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._again: list[Tensor] = []
        seen = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers(), recipe)}
        found = [
            each
            for prefix, holder in holders(model, recipe)
            for key, value in list(vars(holder).items())
            for each in _inside(f"{prefix}.{key}" if prefix else key, value, seen, DEPTH)
        ]
        self._tensors = [(name, tensor, tensor.grad) for name, tensor in found]

    def look(self, total: Tensor) -> None:
        """Note the leaves of the graph of a pass, which `total` is the end of. A leaf that two passes have in common
        was there before them; a pass may make leaves of its own.
        """
        for leaf in _leaves(total):
            before = self._leaves.get(id(leaf))
            if before is not None and before() is leaf:
                self._again.append(leaf)
            elif id(leaf) not in self._own:
                self._leaves[id(leaf)] = weakref.ref(leaf)  # what lives on is measured as memory

    def refuse(self) -> None:
        """Raise ConfigError for a tensor that passes have come to since."""
        if found := self.learning():
            raise outside_error(found[0])

    def learning(self) -> list[str]:
        """What passes have come to since, for `outside_error`; gradients of held ones are dropped."""
        reached = [(name, tensor) for name, tensor, before in self._tensors if tensor.grad is not before]
        named = {id(tensor): name for name, tensor, _ in self._tensors}
        reached += [(named.get(id(leaf), ""), leaf) for leaf in self._again]
        for _, tensor, before in self._tensors:
            tensor.grad = before
        return [self._described(name, tensor) for name, tensor in reached]

    def _described(self, name: str, tensor: Tensor) -> str:
        for own, parameter in self._model.named_parameters():
            if _same(tensor, parameter):
                return f"{COPY}parameter {own}{f' ({name})' if name else ''}"
        return name or f"a tensor of shape {tuple(tensor.shape)}"


def refuse_kept_copies(models: Sequence[nn.Module], recipe: object) -> None:
    """Raise ConfigError where the recipe, or a class or Python module of its author's, keeps a copy of the first of
    `models`, the copies that compute rows in this process: what its loss reads there would be that of one of them.
    """
    model = models[0]
    for name, holder in [*shared_holders(model, recipe), ("recipe", recipe)]:
        for key, value in list(vars(holder).items()):
            items = dict.values(value) if isinstance(value, dict) else value
            for kept in list(items) if isinstance(value, dict | list | tuple) else [value]:
                if isinstance(kept, nn.Module) and (kept is not model or models[1:]) and _is_copy(kept, model):
                    raise outside_error(f"{COPY}model ({name}.{key})")


def _is_copy(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters have the same names and values, and one learns."""
    if one is other:
        return True
    pairs = dict(one.named_parameters()), dict(other.named_parameters())
    if type(one) is not type(other) or not pairs[0] or pairs[0].keys() != pairs[1].keys():
        return False
    learns = any(parameter.requires_grad for parameter in pairs[0].values())
    return learns and all(_same(pairs[0][name], parameter) for name, parameter in pairs[1].items())


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same values, in the format and on the device of the second."""
    if one.shape != other.shape or one.is_meta or other.is_meta or is_dtensor(one) or is_dtensor(other):
        return False
    return torch.equal(one.detach().to(other), other.detach())


def refuse_reached(other: nn.Module) -> None:
    """Raise ConfigError where a pass of one copy of a model has come to parameters of another one."""
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            raise outside_error(f"{COPY}parameter {name}")


COPY = "a copy of the "
"""Begins what is said of a tensor or a module with the values of one of the model."""


def _leaves(total: Tensor) -> list[Tensor]:
    """The leaves of a graph that need a gradient."""
    found, waiting, seen = list[Tensor](), [total.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


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


def outside_error(found: str) -> ConfigError:
    """The error for what `OutsideTensors.learning` has found."""
    if found.startswith(COPY):
        return ConfigError(
            f"the loss can reach {found}, which is not what computes these rows, and nothing updates it: a variable or "
            "an attribute outside of the model keeps a model, of which several copies are made here. Let forward() "
            "return what the loss needs, or use strategy=ddp, with one copy in a process"
        )
    return ConfigError(
        f"the loss depends on {found}, which needs a gradient and is no parameter of the model, so that nothing "
        "updates it. Make it part of what build_model() returns (nn.Parameter, nn.ParameterList, nn.ModuleList; a loss "
        "that learns is a module of the model, and gets its outputs), or call requires_grad_(False) where it is to stay"
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
        inner, form = [*dict.items(value)], "[{!r}]"
    elif isinstance(value, list | tuple | set | deque):
        inner, form = [*enumerate(value)] if len(value) <= _MOST_ITEMS else [], "[{}]"
    elif has_fields(value):
        inner, form = [*fields_of(value).items()], ".{}"
    if not inner or len(inner) > _MOST_ITEMS:
        return
    seen.add(id(value))
    for key, item in inner:
        yield from _inside(name + form.format(key), item, seen, depth - 1)
