"""What an object of an author's own class, or an author's function, keeps: attributes, slots, and the variables of a
closure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from dtf.api.recipe import Dataset, Recipe

_LIBRARIES = frozenset({"torch", "dtf", "numpy", *sys.stdlib_module_names} - {"types", "collections", "__main__"})
"""What their objects keep is their own affair: locks, registries, threads."""


def has_fields(value: Any) -> bool:
    """Whether a value keeps something that may change. A recipe and its data have a life of their own."""
    if isinstance(value, type | nn.Module | Recipe | Dataset):
        return False
    if isinstance(value, MethodType):
        return has_fields(value.__self__)
    if isinstance(value, FunctionType):
        return bool(value.__closure__) and value.__module__.partition(".")[0] not in _LIBRARIES
    module = type(value).__module__.partition(".")[0]
    if module in _LIBRARIES:
        return False
    return hasattr(value, "__dict__") or bool(_slots(value))


def fields_of(value: Any) -> dict[str, Any]:
    """Name -> what a value with fields keeps under it now."""
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    found = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return found | dict(getattr(value, "__dict__", {}))


def set_fields(value: Any, fields: Mapping[str, Any]) -> None:
    """Give a value with fields these, and no others."""
    if isinstance(value, MethodType):
        return
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if name in fields:
                cell.cell_contents = fields[name]
        return
    for name in fields_of(value).keys() - fields.keys():
        object.__delattr__(value, name)
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def _slots(value: Any) -> list[str]:
    found: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else [*slots]
    return [name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
