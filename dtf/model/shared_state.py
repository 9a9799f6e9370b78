"""What all copies of a model in a process share and passes may change: attributes of classes, names of Python modules,
and attributes of the recipe. Threads that compute at the same time would read what others have written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from dtf.model.attributes import DEPTH, Digest

_NOT_THE_AUTHORS = ("torch", "builtins", "dtf", "abc", "typing")


class SharedState:
    """What the classes of a model's modules and of its recipe hold, the Python modules in which they are written, and
    the recipe, as they are now.
    """

    def __init__(self, model: nn.Module, recipe: object) -> None:
        kinds = {kind for part in (*model.modules(), recipe) for kind in type(part).__mro__}
        written = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_THE_AUTHORS]
        files = {kind.__module__ for kind in written if kind.__module__ in sys.modules}
        self._holders: list[tuple[str, Any]] = [(f"{kind.__module__}.{kind.__qualname__}", kind) for kind in written]
        self._holders += [(name, sys.modules[name]) for name in files] + [("the recipe", recipe)]
        self._values = dict(self._now())

    def changed(self) -> list[str]:
        """Names of what was given another value, and of lists, dicts, sets, arrays and tensors that have changed."""
        now = dict(self._now())
        nothing = (None, None)
        return sorted(
            name
            for name in {**self._values, **now}
            if (before := self._values.get(name, nothing))[0] is not (after := now.get(name, nothing))[0]
            or before[1] != after[1]
        )

    def _now(self) -> Iterator[tuple[str, tuple[Any, Any]]]:
        for holder, values in self._holders:
            for key, value in list(vars(values).items()):
                if not key.startswith("__") and not callable(value) and not isinstance(value, ModuleType):
                    state = value._version if isinstance(value, Tensor) else Digest(set()).of(value, DEPTH)
                    yield f"{holder}.{key}", (value, state)
