"""The arguments of a class's constructor. A class named by text is read from its source, which is not run: what it
imports, such as torch, stays out of the process.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dtf.core.errors import ConfigError

_MOST_HOPS = 16

UNKNOWN = object()
"""A default that the source does not spell out."""


class _Place(NamedTuple):
    """A class in a source file."""

    path: Path
    module: str
    node: ast.ClassDef


def constructor_arguments(target: str | type) -> tuple[Parameter, ...]:
    """The arguments of the constructor of a class, without `self`; annotations are text.

    `target`: the class, or "module:Class", whose defaults are UNKNOWN where they are not spelt out. ConfigError where
    the module or the class is not found.
    """
    if isinstance(target, type):
        found = list(inspect.signature(target).parameters.values())
        return tuple(
            argument.replace(annotation=inspect.formatannotation(argument.annotation))
            if argument.annotation is not Parameter.empty
            else argument.replace(annotation="")
            for argument in found
        )
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f'"{target}" names no class; write "package.module:Class"')
    return _constructor(_find(module, name, 0), 0)


def _constructor(place: _Place, hops: int) -> tuple[Parameter, ...]:
    """Those of the class, or of the nearest class that it inherits from and that has some."""
    for node in place.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _parameters(place, node.args)
    for base in place.node.bases:
        if isinstance(base, ast.Name) and hops < _MOST_HOPS:
            return _constructor(_find(place.module, base.id, hops), hops + 1)
    raise ConfigError(f"{place.module}:{place.node.name} has no __init__ in its source; name the class itself")


def _parameters(place: _Place, found: ast.arguments) -> tuple[Parameter, ...]:
    plain = [*found.posonlyargs, *found.args]
    first_default = len(plain) - len(found.defaults)
    values: list[tuple[ast.arg, ast.expr | None, Any]] = [
        (
            argument,
            found.defaults[number - first_default] if number >= first_default else None,
            Parameter.POSITIONAL_OR_KEYWORD,
        )
        for number, argument in enumerate(plain)
    ][1:]
    if found.vararg:
        values.append((found.vararg, None, Parameter.VAR_POSITIONAL))
    values += [
        (argument, default, Parameter.KEYWORD_ONLY)
        for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True)
    ]
    if found.kwarg:
        values.append((found.kwarg, None, Parameter.VAR_KEYWORD))
    return tuple(
        Parameter(
            argument.arg,
            kind,
            default=Parameter.empty if default is None else _value(place, default),
            annotation=ast.unparse(argument.annotation) if argument.annotation else "",
        )
        for argument, default, kind in values
    )


def _value(place: _Place, node: ast.expr) -> Any:
    """A default, made of literals and constants of the module; UNKNOWN where it is made otherwise."""
    try:
        return ast.literal_eval(_Constants(_source(place.path)).visit(ast.parse(ast.unparse(node), mode="eval")))
    except ValueError:
        return UNKNOWN


class _Constants(ast.NodeTransformer):
    """Puts the value of a module's constant in place of its name."""

    def __init__(self, module: ast.Module) -> None:
        self._lines = module.body

    def visit_Name(self, node: ast.Name) -> ast.expr:
        for line in reversed(self._lines):
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                return getattr(line, "value", None) or node
        return node


def _find(module: str, name: str, hops: int) -> _Place:
    """The class `name` of a module, or the one that the module imports under this name."""
    path = _file(module)
    body = _source(path).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _Place(path, module, node)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for source, theirs in _imports(body, name) if hops < _MOST_HOPS else ():
        with suppress(_NotThere):
            return _find(importlib.util.resolve_name(source, package), theirs, hops + 1)
    raise _NotThere(f"{module} has no class {name} in its source ({path.name}); name the class itself if it makes it")


class _NotThere(ConfigError):
    """A module that has no class of this name."""


def _imports(body: Sequence[ast.stmt], name: str) -> Iterator[tuple[str, str]]:
    """(module, name there) of what a module imports under a name; then of what it imports all from."""
    found = [
        ("." * node.level + (node.module or ""), alias)
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    yield from ((source, alias.name) for source, alias in found if (alias.asname or alias.name) == name)
    yield from ((source, name) for source, alias in found if alias.name == "*")


def _file(module: str) -> Path:
    """The source of a module, found without importing what it lies in."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__, or a module without a spec
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f'no module {top} is here, which "{module}:..." names; install its package '
            f"(pip install {top.replace('_', '-')}), or start dtf where it lies"
        )
    folder = Path(spec.origin).parent
    for place in (folder.joinpath(*rest, "__init__.py"), folder.joinpath(*rest).with_suffix(".py")) if rest else ():
        if place.is_file():
            return place
    if rest or not spec.origin.endswith(".py"):
        raise ConfigError(f"the source of {module} is not in {folder}; name the class itself in place of text")
    return Path(spec.origin)


@lru_cache(maxsize=32)
def _source(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def config_type(argument: Parameter) -> Any:
    """The type of a config key for an argument, from its annotation's text and its default. None: no config holds it.

    A whole number without an annotation may become any number: `weight_decay=0`.
    """
    text, default = str(argument.annotation), argument.default
    words = {word for word in _NUMBERS if word in text.replace("[", " ").replace("]", " ").replace(",", " ").split()}
    words |= {word for word in _NUMBERS if text == word}
    optional = default is None or "None" in text or "Optional" in text
    if isinstance(default, tuple | list):
        items = {_scalar(item, words) for item in default}
        if len(items) != 1 or None in items:
            return None
        (item,) = items
        return tuple[item, ...] if isinstance(default, tuple) else list[item]
    if default is None or default is Parameter.empty:
        arms = [_NUMBERS[word] for word in ("bool", "int", "float", "str") if word in words]
        if not arms or "Callable" in text or "[" in text.replace("Optional[", "").replace("Union[", ""):
            return None
        hint = arms[0]
        for arm in arms[1:]:
            hint = hint | arm
    else:
        hint = _scalar(default, words)
    return hint | None if hint is not None and optional else hint


_NUMBERS: Mapping[str, type] = MappingProxyType({"bool": bool, "int": int, "float": float, "str": str})


def _scalar(value: Any, words: set[str]) -> Any:
    if type(value) is int:
        return float if "float" in words else int if "int" in words else int | float
    return type(value) if type(value) in (bool, float, str) else None


def named(arguments: Sequence[Parameter]) -> dict[str, Parameter]:
    """Those that are given by name, by name."""
    return {
        argument.name: argument
        for argument in arguments
        if argument.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
