"""What all copies of a model in a process share and passes may change: attributes of classes, names of Python modules,
and attributes of the recipe. Threads that compute at the same time would read what others have written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from dtf.model.attributes import DEPTH, Digest, is_small
from dtf.model.contents import Contents

_RECIPE = "the recipe"
_NOT_THE_AUTHORS = ("torch", "builtins", "dtf", "abc", "typing")


class _Value(NamedTuple):
    holder: Any  # a class, a Python module or the recipe
    key: str
    value: Any
    state: Any  # differs with the content


class SharedState:
    """What the classes of a model's modules and of its recipe hold, the Python modules in which they are written, and
    the recipe, as they are now.
    """

    def __init__(self, model: nn.Module, recipe: object) -> None:
        self._holders = [*shared_holders(model, recipe), (_RECIPE, recipe)]
        self._values = dict(self._now())
        self._contents = Contents(set())
        for each in self._values.values():
            if is_small(each.value):
                self._contents.keep(each.value, DEPTH)
        for kept in _kept_by_functions(self._holders):
            if is_small(kept):
                self._contents.keep(kept, DEPTH)

    def changed(self) -> list[str]:
        """Names of what was given another value, and of lists, dicts, sets, arrays and tensors that have changed."""
        now = dict(self._now())
        nothing = _Value(None, "", None, None)
        return sorted(
            name
            for name in {**self._values, **now}
            if (before := self._values.get(name, nothing)).value is not (after := now.get(name, nothing)).value
            or before.state != after.state
        )

    def changed_in_code(self) -> list[str]:
        """As `changed`, of classes and Python modules alone."""
        return [name for name in self.changed() if not name.startswith(_RECIPE)]

    def restore(self) -> None:
        """Give back what was changed, but for large values."""
        now = dict(self._now())
        for name, each in self._values.items():
            if name not in now or now[name].value is not each.value:
                setattr(each.holder, each.key, each.value)
        for name in now.keys() - self._values.keys():
            delattr(now[name].holder, now[name].key)
        self._contents.restore()

    def _now(self) -> Iterator[tuple[str, _Value]]:
        for name, holder in self._holders:
            for key, value in shared_values(holder):
                state = value._version if isinstance(value, Tensor) else Digest(set()).of(value, DEPTH)
                yield f"{name}.{key}", _Value(holder, key, value, state)


def shared_holders(model: nn.Module, recipe: object) -> list[tuple[str, Any]]:
    """The classes of a model's modules and of its recipe, the Python modules in which they are written, and the other
    classes there, by name.
    """
    kinds = {kind for part in (*model.modules(), recipe) for kind in type(part).__mro__}
    written = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_THE_AUTHORS]
    files = {kind.__module__ for kind in written if kind.__module__ in sys.modules}
    beside = {each for name in files for each in vars(sys.modules[name]).values() if isinstance(each, type)}
    written += [kind for kind in beside.difference(written) if kind.__module__ in files]
    return [
        *((f"{kind.__module__}.{kind.__qualname__}", kind) for kind in written),
        *((name, sys.modules[name]) for name in files),
    ]


def _kept_by_functions(holders: Sequence[tuple[str, Any]]) -> Iterator[Any]:
    """Functions of classes and Python modules that have a cache, and containers that are defaults of arguments."""
    for _, holder in holders:
        for value in list(vars(holder).values()):
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if hasattr(value, "cache_clear"):
                yield value
            elif isinstance(value, FunctionType):
                yield from (each for each in value.__defaults__ or () if isinstance(each, list | dict | set))


def shared_values(holder: Any) -> Iterator[tuple[str, Any]]:
    """The values that a class, a Python module or a recipe holds; no functions, classes and modules."""
    for key, value in list(vars(holder).items()):
        if not key.startswith("__") and not callable(value) and not isinstance(value, ModuleType):
            yield key, value
