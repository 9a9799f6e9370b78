"""Parameters that a model reaches by another way than through the module that owns them.

A strategy that gives parameters other memory changes what their modules have, and nothing else.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
DEPTH = 3
"""How deep containers in attributes are followed to name who holds a parameter."""


class Originals:
    """The parameters of a model as they are now, without holding them."""

    def __init__(self, model: nn.Module) -> None:
        self._found = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}

    def refuse_held(self, model: nn.Module, strategy: str, instead: str) -> None:
        """Raise ConfigError for a parameter that modules have no more, and that something else still holds. `instead`:
        what to use.
        """
        kept = {id(parameter) for parameter in model.parameters()}
        if all(parameter is None or id(parameter) in kept for parameter in (found() for found in self._found.values())):
            return
        gc.collect()  # what only holds itself
        for name, found in self._found.items():
            parameter = found()
            if parameter is None or id(parameter) in kept:
                continue
            holders = [holder for holder in gc.get_referrers(parameter) if not isinstance(holder, FrameType)]
            if holders:  # a graph that was left, as of weight_norm, holds it too, and is not asked for it
                raise ConfigError(
                    f"the parameter {name} is also kept {_place(model, parameter, holders)}. What is kept there is not "
                    f"trained, as {strategy} gives the module that owns the parameter another one; read it from the "
                    f"module where the forward pass needs it (self.{name}), or use {instead}"
                )


def _place(model: nn.Module, parameter: Tensor, holders: list[Any]) -> str:
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED and _holds(value, parameter, DEPTH):
                return f"in the attribute {prefix}.{key}" if prefix else f"in the attribute {key}"
    if any(isinstance(holder, CellType) for holder in holders):
        return "in a variable of a function that was made in the constructor"
    return f"in an object of type {type(holders[0]).__name__}"


def _holds(value: Any, parameter: Tensor, depth: int) -> bool:
    if value is parameter:
        return True
    if depth == 0 or isinstance(value, nn.Module | Tensor | str):
        return False
    if isinstance(value, dict):
        return any(_holds(item, parameter, depth - 1) for item in dict.values(value))
    if isinstance(value, list | tuple | set):
        return any(_holds(item, parameter, depth - 1) for item in value)
    cells = getattr(value, "__closure__", None) or ()
    return any(cell.cell_contents is parameter for cell in cells if cell != CellType())


def refuse_shared_memory(model: nn.Module, strategy: str, instead: str, parameters_only: bool = False) -> None:
    """Raise ConfigError for a parameter of which another one, a buffer or an attribute uses the memory without being
    it. `instead`: what to use. `parameters_only`: only another parameter counts.
    """
    found = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
    if not parameters_only:
        own = {id(parameter) for _, parameter, _ in found}
        found += [(name, buffer, False) for name, buffer in model.named_buffers()]
        found += [(name, tensor, False) for name, tensor in _attributes(model) if id(tensor) not in own]
    places: dict[int, list[tuple[str, Tensor, bool]]] = {}
    for name, tensor, trained in found:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor, trained))
    for group in places.values():
        pair = _overlapping(group)
        if pair is not None:
            one, other = pair
            raise ConfigError(
                f"{one} and {other} share memory without being one parameter (as by .data), and {strategy} gives each "
                f"memory of its own; assign the parameter itself to the second module, read it where it is needed, or "
                f"use {instead}"
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in plain attributes of modules, without those that torch makes anew in each pass."""
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        made = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        if isinstance(module, nn.RNNBase):
            made.add("_flat_weights")
        for key, value in vars(module).items():
            if key not in _REGISTERED and key not in made and isinstance(value, Tensor | list | tuple | dict):
                tensors = _tensors(value, set())
                yield from ((f"{prefix}.{key}" if prefix else key, tensor) for tensor in tensors)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Those in a container, which may hold itself."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        for item in list(dict.values(value) if isinstance(value, dict) else value):
            yield from _tensors(item, seen)


def _overlapping(group: list[tuple[str, Tensor, bool]]) -> tuple[str, str] | None:
    """Two tensors of one memory that have an element in common, of which at least one is trained."""
    before: list[tuple[str, Tensor, bool]] = []
    for name, tensor, trained in sorted(group, key=lambda item: item[1].data_ptr()):
        before = [item for item in before if _end(item[1]) > tensor.data_ptr()]
        for other, earlier, also in before:
            if (trained or also) and _overlap(earlier, tensor):
                return other, name
        before.append((name, tensor, trained))
    return None


def _end(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Of tensors whose ends overlap: columns of one matrix need not have elements in common."""
    if (a.is_contiguous() and b.is_contiguous()) or a.element_size() != b.element_size():
        return True
    taken = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())
