"""The arguments of a class or function as config keys. One that is named by text is read from its source, which is not
run: what it imports, such as torch, stays out of the process.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dtf.core.errors import ConfigError

_MOST_HOPS = 16
_SCALARS: Mapping[str, type] = types.MappingProxyType({"bool": bool, "int": int, "float": float, "str": str})
_LISTS = ("list", "List", "Sequence", "tuple", "Tuple")


class Argument(NamedTuple):
    """An argument that is given by name."""

    name: str
    hint: Any
    """The type of its config key. None: no config holds it."""

    default: Any
    """Plain. MISSING: it has none. UNKNOWN: it has one that a config does not hold."""


class _Sentinel:
    """A default that is no value."""


MISSING, UNKNOWN = _Sentinel(), _Sentinel()


class _Place(NamedTuple):
    """A class or a function in a source file."""

    module: str
    node: ast.ClassDef | ast.FunctionDef


def arguments_of(target: str | Callable[..., Any]) -> list[Argument]:
    """The arguments of a function, or of the constructor of a class. `target`: itself, or "module:name".

    ConfigError where the module or the name is not found.
    """
    if not isinstance(target, str):
        return _of_callable(target)
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f'"{target}" names no class; write "package.module:Class"')
    place = _find(module, name, 0)
    found = place.node if isinstance(place.node, ast.FunctionDef) else _constructor(place, 0)
    return _arguments(found) if found is not None else []


def source_file(target: str | Callable[..., Any]) -> str:
    """The module that a target lies in."""
    return target.partition(":")[0] if isinstance(target, str) else target.__module__


def load(target: str | Callable[..., Any]) -> Any:
    """The class or function itself; imports its module. ConfigError where it is not there."""
    if not isinstance(target, str):
        return target
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        raise ConfigError(f"the module {name} has no {attribute}, which a plugin names as {target!r}")
    return getattr(module, attribute)


# ------------------------------------------------------------ of an object


def _of_callable(target: Callable[..., Any]) -> list[Argument]:
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{target!r} has no signature to read: {error}; write a function that makes it") from error
    arguments = []
    for each in found:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            continue
        default = MISSING if each.default is each.empty else each.default
        text = "" if each.annotation is each.empty else inspect.formatannotation(each.annotation).replace("'", "")
        arguments.append(_argument(each.name, _parsed(text), default))
    return arguments


# ------------------------------------------------------------ of a source


def _constructor(place: _Place, hops: int) -> ast.FunctionDef | None:
    """Of the class, or of the nearest class that it inherits from. None: no class in reach has one."""
    assert isinstance(place.node, ast.ClassDef)
    for node in place.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return node
    for base in place.node.bases:
        if isinstance(base, ast.Name) and hops < _MOST_HOPS:
            try:
                other = _find(place.module, base.id, hops + 1)
            except ConfigError:
                continue  # a class of a library
            if isinstance(other.node, ast.ClassDef):
                return _constructor(other, hops + 1)
    return None


def _arguments(node: ast.FunctionDef) -> list[Argument]:
    spec, is_method = node.args, node.name == "__init__"
    plain = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(plain) - len(spec.defaults)) + list(spec.defaults)
    pairs = [*list(zip(plain, defaults, strict=True))[is_method:], *zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return [_argument(each.arg, each.annotation, _literal(default)) for each, default in pairs]


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return MISSING
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _find(module: str, name: str, hops: int) -> _Place:
    """What has this name in a module, or what the module imports under it."""
    path = _file(module)
    body = _source(path).body
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _Place(module, node)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in body:
        if not isinstance(node, ast.ImportFrom) or hops >= _MOST_HOPS:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                relative = "." * node.level + (node.module or "")
                return _find(importlib.util.resolve_name(relative, package), alias.name, hops + 1)
    raise ConfigError(f"{module} has no class or function {name} in its source ({path.name}); correct the name")


def _file(module: str) -> Path:
    """The source of a module, found without importing what it lies in."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__, or a module without a spec
        spec = None
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if spec is None or spec.origin is None:
        if loaded:
            return Path(loaded)
        raise ConfigError(f'no module {top} is here, which "{module}:..." names; start dtf where it lies')
    folder = Path(spec.origin).parent
    for path in (folder.joinpath(*rest, "__init__.py"), folder.joinpath(*rest).with_suffix(".py")) if rest else ():
        if path.is_file():
            return path
    if rest or not spec.origin.endswith(".py"):
        raise ConfigError(f"the source of {module} is not in {folder}; name the class itself in place of text")
    return Path(spec.origin)


@lru_cache(maxsize=32)
def _source(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


# ------------------------------------------------------------ types


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body if text else None
    except SyntaxError:
        return None


def _argument(name: str, annotation: ast.expr | None, default: Any) -> Argument:
    hint = _hint(annotation) if annotation is not None else _of_value(default)
    if hint is not None and default is None and type(None) not in typing.get_args(hint):
        hint = hint | None
    if default is MISSING:
        return Argument(name, hint, MISSING)
    if hint is None or default is UNKNOWN or not _is_plain(default):
        return Argument(name, None, UNKNOWN)
    return Argument(name, hint, list(default) if isinstance(default, tuple) else default)


def _hint(node: ast.expr | None) -> Any:
    """The type of a config key for an annotation. None: none."""
    if isinstance(node, ast.Constant):
        return type(None) if node.value is None else _hint(_parsed(node.value)) if type(node.value) is str else None
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if name:
        return str if name in ("Path", "PathLike") else list if name in ("list", "List") else _SCALARS.get(name)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_hint(node.left), _hint(node.right)])
    if isinstance(node, ast.Subscript):
        outer = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == "Optional":
            return _union([_hint(inner[0]), type(None)])
        if outer == "Union":
            return _union([_hint(each) for each in inner])
        item = _hint(inner[0])
        return list[item] if outer in _LISTS and item in _SCALARS.values() else None
    return None


def _union(arms: Sequence[Any]) -> Any:
    """Of those that a config holds; None where there is none but null."""
    known = [arm for arm in arms if arm is not None]
    return functools.reduce(operator.or_, known) if any(arm is not type(None) for arm in known) else None


def _of_value(default: Any) -> Any:
    """The type of a key without an annotation. A whole number may become any number: `weight_decay=0`."""
    if type(default) is int:
        return int | float
    if isinstance(default, list | tuple) and default:
        items = {type(item) for item in default}
        return list[items.pop()] if len(items) == 1 and items <= set(_SCALARS.values()) else None
    return type(default) if type(default) in _SCALARS.values() else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in _SCALARS.values()
