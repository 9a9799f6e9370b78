"""Plain attributes of a model's modules, which torch does not see: kept and restored around passes that must leave no
trace, and compared.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtf.model.changing_buffers import buffers_restored

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, children, hooks."""
GENERATOR = " (a generator)"
"""Ends the name of an attribute that is a generator of random numbers, in `Attributes.changed`."""
DEPTH = 4
"""How deep containers and objects in attributes are followed."""


class Attributes:
    """The attributes of all modules of a model as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [(name, module, dict(vars(module))) for name, module in _modules(model)]
        self._restorers: list[Callable[[], Any]] = []
        seen: set[int] = {id(module) for module in model.modules()}
        for _, _, values in self._modules:
            for _, value in _own(values):
                self._keep(value, seen, DEPTH)
        self._digests = digests(model)

    def restore(self) -> None:
        """Give all modules their attributes back."""
        with torch.no_grad():
            for _, module, values in self._modules:
                for key in [key for key, _ in _own(vars(module)) if key not in values]:
                    del vars(module)[key]
                vars(module).update(_own(values))
            for restore in self._restorers:
                restore()

    def changed(self) -> list[str]:
        """Names of attributes that are not as they were."""
        now = digests(self._model)
        names = [name for name in {**self._digests, **now} if self._digests.get(name) != now.get(name)]
        return [name + GENERATOR * now.get(name, "").startswith(("generator", "random")) for name in names]

    def _keep(self, value: Any, seen: set[int], depth: int) -> None:
        """Note how to restore the content of a value that may change."""
        if depth == 0 or id(value) in seen or isinstance(value, type | nn.Module):
            return
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_meta and value.layout is torch.strided:
                seen.add(id(value))
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
        else:
            self._keep_container(value, seen, depth)

    def _keep_container(self, value: Any, seen: set[int], depth: int) -> None:
        if isinstance(value, list | deque):
            items = list(value)
            self._restorers.append(lambda: (value.clear(), value.extend(items)))
        elif isinstance(value, dict):
            pairs = dict(value)
            self._restorers.append(lambda: (value.clear(), value.update(pairs)))
            items = list(pairs.values())
        elif isinstance(value, set):
            members = set(value)
            self._restorers.append(lambda: (value.clear(), value.update(members)))
            items = []
        elif isinstance(value, tuple):
            items = list(value)
        elif _has_fields(value):
            fields = dict(vars(value))
            self._restorers.append(lambda: (vars(value).clear(), vars(value).update(fields)))
            items = list(fields.values())
        else:
            return
        seen.add(id(value))
        for item in items:
            self._keep(item, seen, depth - 1)


@contextmanager
def without_trace(models: Sequence[nn.Module]) -> Iterator[None]:
    """A context for passes whose effects on buffers and attributes are undone at its end."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(buffers_restored(model))
            stack.callback(Attributes(model).restore)
        yield


def _restore(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor its numbers back, where they differ: memory of others cannot always be written."""
    if tensor.shape == before.shape and not torch.equal(tensor, before):
        tensor.copy_(before)


def digests(model: nn.Module) -> dict[str, str]:
    """Full name of each plain attribute that has a value which can be compared -> a text that differs with it."""
    modules = {id(module) for module in model.modules()}
    return {
        f"{prefix}.{key}" if prefix else key: text
        for prefix, module in _modules(model)
        for key, value in _own(vars(module))
        if (text := _digest(value, modules, DEPTH))
    }


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All but those of TorchScript, whose attributes are its own."""
    return ((name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule))


def _own(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in list(values.items()) if key not in _TORCHS_OWN and key != "training")


def _digest(value: Any, modules: set[int], depth: int) -> str:
    """Empty for what cannot be compared."""
    if depth == 0 or isinstance(value, nn.Module | nn.Parameter | type) or callable(value):
        return ""
    if isinstance(value, bool | int | float | str | bytes | complex | None):
        return repr(value)
    if isinstance(value, Tensor):
        return f"tensor {_bytes(value):08x} {tuple(value.shape)}" if not value.is_meta else ""
    if isinstance(value, torch.Generator):
        return f"generator {_bytes(value.get_state()):08x}"
    if isinstance(value, random.Random):
        return f"random {zlib.crc32(repr(value.getstate()).encode()):08x}"
    if isinstance(value, np.random.Generator):
        return f"random {zlib.crc32(repr(value.bit_generator.state).encode()):08x}"
    if isinstance(value, np.ndarray):
        return f"array {zlib.crc32(np.ascontiguousarray(value).tobytes()):08x} {value.shape}"
    if isinstance(value, dict):
        items = [(repr(key)[:80], _digest(item, modules, depth - 1)) for key, item in value.items()]
        return repr(items)
    if isinstance(value, list | tuple | deque):
        return repr([_digest(item, modules, depth - 1) for item in value])
    if isinstance(value, set | frozenset):
        return repr(sorted(repr(item)[:80] for item in value))
    return repr(_digest(vars(value), modules, depth - 1)) if _has_fields(value) else ""


def _has_fields(value: Any) -> bool:
    """Whether a value is an object of someone's own class, with attributes that may change."""
    module = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(value) and module not in ("torch", "dtf", "builtins", "numpy")


def _bytes(tensor: Tensor) -> int:
    part = getattr(tensor, "_local_tensor", tensor)
    if part.layout is not torch.strided or not part.numel():
        return 0
    return zlib.crc32(part.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
