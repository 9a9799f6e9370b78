"""Plain attributes of a model's modules, which torch does not see: kept and restored around passes that must leave no
trace, and compared.
"""

from __future__ import annotations

import copy
import random
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.changing_buffers import buffers_restored
from dtf.model.contents import Contents, own_attributes
from dtf.model.fingerprint import fingerprints
from dtf.model.norm_calls import Calls
from dtf.model.object_fields import fields_of, has_fields

GENERATOR = " (a generator)"
"""Ends the name of an attribute that is a generator of random numbers, in `Attributes.changed`."""
DEPTH = 4
"""How deep containers and objects in attributes are followed."""
MOST_ITEMS = 10_000
"""Of all containers in an attribute; of larger ones the first items and the number of items are compared."""
MOST_BYTES = 1 << 26
"""Of an array or a text in an attribute; of larger ones evenly spaced numbers, and the ends, are compared."""
_MOST_KEPT, _MOST_KEPT_ITEMS = 1 << 20, 1000
"""Bytes of an array, and items of a container, that a recipe's loss may keep."""
_COUNTED = frozenset({"_calls", "momentum"})
"""Attributes of normalisations that dtf changes from step to step, see `BatchNormStatistics`."""


class Attributes:
    """The attributes of all modules of a model as they are now, and those of its recipe, where one is given."""

    def __init__(self, model: nn.Module, recipe: object = None) -> None:
        self._model, self._recipe = model, recipe
        self._holders = [(holder, _copied(dict(vars(holder)))) for _, holder in holders(model, recipe)]
        self._contents = Contents(_parts_of(model))
        self._modules = [(module, set(module._modules)) for _, module in holders(model, None)]
        for holder, values in self._holders:
            for _, value in own_attributes(values):
                if holder is not recipe or is_small(value):
                    self._contents.keep(value, DEPTH)
        self._digests = digests(model, recipe)
        self._streams = {name: (value, _position(value)) for name, value in _streams(model)}

    def restore(self) -> None:
        """Give all their attributes back, and take modules away that passes have added."""
        with torch.no_grad():
            for holder, values in self._holders:
                for key in [key for key, _ in own_attributes(vars(holder)) if key not in values]:
                    del vars(holder)[key]
                vars(holder).update(own_attributes(values))
            for module, names in self._modules:
                for key in module._modules.keys() - names:
                    del module._modules[key]
            self._contents.restore()

    def refuse_read(self) -> None:
        """Raise ConfigError for a generator that passes have read from: nothing can put it back."""
        for name, (value, position) in self._streams.items():
            if _position(value) != position:
                raise ConfigError(
                    f"passes read from the generator {name}, which cannot be put back after a pass that only tries "
                    "something, nor saved; keep a count in the model, and compute the value of it"
                )

    def changed(self) -> list[str]:
        """Names of attributes that are not as they were."""
        now = digests(self._model, self._recipe)
        names = [name for name in {**self._digests, **now} if self._digests.get(name) != now.get(name)]
        return [name + GENERATOR * now.get(name, "").startswith(("generator", "random")) for name in names]


@contextmanager
def without_trace(models: Sequence[nn.Module], recipe: object = None) -> Iterator[None]:
    """A context for passes whose effects on buffers and attributes are undone at its end."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(buffers_restored(model))
            stack.callback(Attributes(model, recipe).restore)
        yield


def digests(model: nn.Module, recipe: object = None) -> dict[str, str]:
    """Full name of each plain attribute that has a value which can be compared -> a text that differs with it."""
    parts = _parts_of(model)
    plain = plain_attributes(model, recipe)
    return {name: text for name, _, _, value in plain if (text := Digest(parts).of(value, DEPTH))}


def _parts_of(model: nn.Module) -> set[int]:
    """Ids of what is torch's to keep: modules, parameters and buffers."""
    return {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}


def plain_attributes(model: nn.Module, recipe: object = None) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """(full name, attributes of its holder, key, value) of each that torch does not keep and dtf does not change."""
    for prefix, holder in holders(model, recipe):
        for key, value in own_attributes(vars(holder)):
            counted = key in _COUNTED and isinstance(vars(holder).get("_calls"), Calls)
            if not counted and (holder is not recipe or is_small(value)):
                yield f"{prefix}.{key}" if prefix else key, vars(holder), key, value


def is_small(value: Any) -> bool:
    """Whether an attribute of a recipe may be what its loss keeps: large values and objects are its data, which other
    threads may read meanwhile.
    """
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes <= _MOST_KEPT
    if isinstance(value, dict | list | tuple | deque | set):
        items = dict.values(value) if isinstance(value, dict) else value
        return len(value) <= _MOST_KEPT_ITEMS and all(is_small(item) for item in list(items))
    return not has_fields(value)


def holders(model: nn.Module, recipe: object) -> Iterator[tuple[str, Any]]:
    """The modules, without those of TorchScript, whose attributes are its own; and the recipe."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module
    if recipe is not None:
        yield "recipe", recipe


def _streams(model: nn.Module) -> Iterator[tuple[str, GeneratorType[Any, Any, Any]]]:
    """The attributes that are generators of Python."""
    for name, _, _, value in plain_attributes(model):
        if isinstance(value, GeneratorType):
            yield name, value


def _position(stream: GeneratorType[Any, Any, Any]) -> str:
    """Differs after each value: where the generator is, and what its variables are."""
    frame = stream.gi_frame
    return "ended" if frame is None else f"{frame.f_lasti} {frame.f_locals!r}"


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """The same attributes, and copies of iterators, which passes move on."""
    for key, value in values.items():
        if type(value).__module__ == "itertools":
            with suppress(TypeError), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                values[key] = copy.copy(value)
    return values


class Digest:
    """Texts for the value of one attribute, which look at MOST_ITEMS items. `parts`: ids of what is left out."""

    def __init__(self, parts: set[int]) -> None:
        self._parts, self._left = parts, MOST_ITEMS

    def of(self, value: Any, depth: int) -> str:
        """Empty for what cannot be compared."""
        if depth == 0 or id(value) in self._parts or isinstance(value, type | torch.jit.ScriptModule):
            return ""
        if isinstance(value, nn.Module):
            tensors = [tensor for tensor in (*value.parameters(), *value.buffers()) if not tensor.is_meta]
            own = {f"{n}.{key}": item for n, m in value.named_modules() for key, item in own_attributes(vars(m))}
            return f"module {fingerprints(tensors)} {self.of(own, depth - 1)}"
        if callable(value) and not has_fields(value):
            return ""
        if isinstance(value, bool | int | float | complex | None):
            return repr(value)
        if isinstance(value, str | bytes):
            data = value.encode(errors="replace") if isinstance(value, str) else value
            return repr(value) if len(data) < 80 else f"text {_crc(np.frombuffer(data, np.uint8))} {len(data)}"
        if isinstance(value, Tensor):
            return f"tensor {fingerprints([value])[0]:x} {tuple(value.shape)}" if not value.is_meta else ""
        if isinstance(value, torch.Generator):
            return f"generator {_crc(value.get_state().numpy())}"
        if isinstance(value, random.Random):
            return f"random {zlib.crc32(repr(value.getstate()).encode()):08x}"
        if isinstance(value, np.random.Generator):
            return f"random {zlib.crc32(repr(value.bit_generator.state).encode()):08x}"
        if isinstance(value, np.ndarray):
            return f"array {_crc(value)} {value.shape}"
        return self._of_container(value, depth)

    def _of_container(self, value: Any, depth: int) -> str:
        if isinstance(value, dict):
            # not by [], which a class of dicts may make a call: of transformers, one that makes a module
            items = [(repr(key)[:80], self.of(item, depth - 1)) for key, item in self._some(dict.items(value))]
            return f"{len(value)} {items}"
        if isinstance(value, list | tuple | deque):
            return f"{len(value)} {[self.of(item, depth - 1) for item in self._some(value)]}"
        if isinstance(value, set | frozenset):
            members = sorted(repr(item)[:80] for item in value) if len(value) <= self._left else []
            self._left -= len(members)
            return f"{len(value)} {members}"
        return f"({self.of(fields_of(value), depth - 1)})" if has_fields(value) else ""

    def _some(self, items: Collection[Any]) -> list[Any]:
        """As many items as are still looked at."""
        some = list(islice(items, self._left))
        self._left -= len(some)
        return some


def _crc(array: np.ndarray) -> str:
    """Of an array's bytes, or of some of them."""
    if array.dtype.hasobject:
        return ""
    if array.nbytes > MOST_BYTES:
        flat = array.reshape(-1)
        step = -(-array.nbytes // MOST_BYTES)
        array = np.concatenate([flat[::step], flat[-step:]])
    return f"{zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data if array.size else b''):08x}"
