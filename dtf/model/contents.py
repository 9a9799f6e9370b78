"""What values hold as it is now, to be put back after passes that must leave no trace: numbers of tensors and arrays,
items of containers, fields of objects, states of generators.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtf.model.object_fields import fields_of, has_fields, set_fields

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, children, hooks."""
FUNCTION_DRAWS = "_function_draws"
"""What dtf gives a module in a trial pass, see `dtf.model.seeded_calls`."""


def own_attributes(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of a module's attributes that are its author's."""
    left_out = _TORCHS_OWN | {"training", FUNCTION_DRAWS}
    return ((key, value) for key, value in list(values.items()) if key not in left_out)


class Contents:
    """The contents of some values. `parts`: ids of what is left out."""

    def __init__(self, parts: set[int]) -> None:
        self._seen = set(parts)
        self._restorers: list[Callable[[], Any]] = []

    @torch.no_grad()
    def restore(self) -> None:
        """Give all of them their contents back."""
        for restore in self._restorers:
            restore()

    def keep(self, value: Any, depth: int) -> None:
        """Note how to restore the content of a value that may change."""
        if depth == 0 or id(value) in self._seen or isinstance(value, type):
            return
        if isinstance(value, nn.Module):  # in a list, or a recipe's: none of the model
            for module in value.modules():
                self._keep_module(module, depth - 1)
        elif isinstance(value, Tensor):
            if not value.is_meta and value.layout is torch.strided:
                self._seen.add(id(value))
                before = value.detach().clone()
                self._restorers.append(lambda: _restore(value.detach(), before))
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._restorers.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            python = value.getstate()
            self._restorers.append(lambda: value.setstate(python))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator.state
            self._restorers.append(lambda: setattr(value.bit_generator, "state", bits))
        elif isinstance(value, np.ndarray):
            array = value.copy()
            if value.flags.writeable:
                self._restorers.append(lambda: np.copyto(value, array))
        elif isinstance(value, threading.local):  # of this thread
            self.keep(vars(value), depth)
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            self.keep(vars(value)["data"], depth)
        elif hasattr(value, "cache_clear") and hasattr(value, "cache_info"):  # functools.lru_cache
            if not value.cache_info().currsize:
                self._restorers.append(value.cache_clear)
        else:
            self._keep_container(value, depth)

    def _keep_module(self, module: nn.Module, depth: int) -> None:
        if id(module) in self._seen or isinstance(module, torch.jit.ScriptModule):
            return
        self._seen.add(id(module))
        values = dict(vars(module))
        self._restorers.append(lambda: _put_back(vars(module), values))
        for value in (*module._parameters.values(), *module._buffers.values(), *dict(own_attributes(values)).values()):
            self.keep(value, depth)

    def _keep_container(self, value: Any, depth: int) -> None:
        if isinstance(value, list):
            items = list(value)
            self._restorers.append(lambda: value.__setitem__(slice(None), items))
        elif isinstance(value, deque):
            items = list(value)
            self._restorers.append(lambda: (value.clear(), value.extend(items)))
        elif isinstance(value, dict):
            pairs = dict(dict.items(value))  # as it lies there: the class may make something of what it gives
            self._restorers.append(lambda: _put_back(value, pairs))
            items = list(pairs.values())
        elif isinstance(value, set):
            members = set(value)
            self._restorers.append(lambda: (value.clear(), value.update(members)))
            items = []
        elif isinstance(value, tuple):
            items = list(value)
        elif has_fields(value):
            fields = fields_of(value)
            self._restorers.append(lambda: set_fields(value, fields))
            items = list(fields.values())
        else:
            return
        self._seen.add(id(value))
        for item in items:
            self.keep(item, depth - 1)


def _put_back(mapping: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict these items, and no others. It is never empty meanwhile: other threads may read it."""
    for key in [key for key in dict.keys(mapping) if key not in before]:
        del mapping[key]
    mapping.update(before)
    if list(dict.keys(mapping)) != list(before):
        for key in before:
            mapping[key] = mapping.pop(key)


def _restore(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor its numbers back, where they differ: memory of others cannot always be written."""
    if tensor.shape == before.shape and not torch.equal(tensor, before):
        tensor.copy_(before)
