"""The arguments of a class or function, and the types of config keys for them. What is named by text is read from its
source, which is not run: what it imports, such as torch, stays out of the process.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, get_args, get_origin

from dtf.core.errors import ConfigError
from dtf.core.main_module import MAIN, is_loaded, loaded_module, main_module_name

_MOST_HOPS = 16

UNKNOWN = object()
"""A default that the source does not spell out."""

Target = str | Callable[..., Any]
"""A class or function, or "module:name"."""


class _Place(NamedTuple):
    """A class or a function in a source file."""

    path: Path
    module: str
    node: ast.ClassDef | ast.FunctionDef


def arguments_of(target: Target) -> tuple[Parameter, ...]:
    """The arguments of a function, or of the constructor of a class, without `self`. Annotations are text; defaults of
    what is named by text are UNKNOWN where its source does not spell them out.

    Empty for a class named by text where no source in reach has a constructor of it or of a class that it inherits
    from. ConfigError where the module or the name is not found.
    """
    if not isinstance(target, str):
        return _of_callable(target)
    place = _find(*_parts(target), 0)
    found = place if isinstance(place.node, ast.FunctionDef) else _constructor(place, 0)
    return tuple(_of_source(found)) if found is not None else ()


def named(arguments: Iterable[Parameter]) -> dict[str, Parameter]:
    """Those that are given by name, by name."""
    return {
        argument.name: argument
        for argument in arguments
        if argument.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }


def load(target: Target) -> Any:
    """The class or function itself; imports its module. ImportError from it; ConfigError for a name it has not."""
    if not isinstance(target, str):
        return target
    module_name, name = _parts(target)
    # a script that was started as __main__ must not run a second time
    module = loaded_module(module_name) if is_loaded(module_name) else importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ConfigError(f'the module {module_name} has no {name}, which "{target}" names; correct the name')
    return getattr(module, name)


def module_of(target: Target) -> str:
    """The name of the module that it is in."""
    return target.partition(":")[0] if isinstance(target, str) else target.__module__


def name_in_module(target: Target) -> str:
    """Its name there."""
    return (
        target.partition(":")[2] if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)
    )


def _parts(target: str) -> tuple[str, str]:
    """The module and the name in it. ConfigError for another text, and for `__main__`, which is another in ranks."""
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f'"{target}" names no class; write "package.module:Class"')
    if module == MAIN:
        known = main_module_name()
        other = f'"{known}:{name}"' if known else "a file of it, such as my_parts.py, and its name there"
        raise ConfigError(
            f'"{target}": {MAIN} is another module in each process, and ranks would not find {name} in theirs; give '
            f"the class or function itself, {name}, or {other}"
        )
    return module, name


def _of_callable(target: Callable[..., Any]) -> tuple[Parameter, ...]:
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{target!r} has no signature to read: {error}; give a function that makes it") from error
    return tuple(
        argument.replace(
            annotation="" if argument.annotation is Parameter.empty else inspect.formatannotation(argument.annotation)
        )
        for argument in found
    )


# ------------------------------------------------------------ of a source


def _constructor(place: _Place, hops: int) -> _Place | None:
    """Of the class, or of the nearest class that it inherits from. None: no class in reach has one."""
    assert isinstance(place.node, ast.ClassDef)
    for node in reversed(place.node.body):  # the last one counts, as of several `@overload`
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _Place(place.path, place.module, node)
    for base in place.node.bases if hops < _MOST_HOPS else ():
        with suppress(ConfigError):  # it is a class of something compiled, or of a package that is not here
            other = _find(*_base(place, base), hops + 1)
            if isinstance(other.node, ast.ClassDef) and (found := _constructor(other, hops + 1)):
                return found
    return None


def _base(place: _Place, node: ast.expr) -> tuple[str, str]:
    """The module and the name of a class that is inherited from. ConfigError where the text tells neither."""
    if isinstance(node, ast.Subscript):  # Generic[T]
        return _base(place, node.value)
    if isinstance(node, ast.Name):
        return place.module, node.id
    head, *inner = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
    for line in _statements(_source(place.path).body):
        for alias in line.names if isinstance(line, ast.Import | ast.ImportFrom) else ():
            if (alias.asname or alias.name.partition(".")[0]) == head:
                if isinstance(line, ast.ImportFrom):
                    module = f"{_imported_module(place.path, place.module, line)}.{alias.name}"
                else:
                    module = alias.name if alias.asname else head
                return ".".join([module, *inner[:-1]]), inner[-1]
    raise _NotThere(f"{place.module} does not import {ast.unparse(node)} by a name")


def _of_source(place: _Place) -> Iterator[Parameter]:
    assert isinstance(place.node, ast.FunctionDef)
    given, is_method = place.node.args, place.node.name == "__init__"
    plain = [(argument, Parameter.POSITIONAL_ONLY) for argument in given.posonlyargs]
    plain += [(argument, Parameter.POSITIONAL_OR_KEYWORD) for argument in given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    listed = [(*pair, default) for pair, default in zip(plain, defaults, strict=True)][is_method:]
    if given.vararg:
        listed.append((given.vararg, Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        listed.append((argument, Parameter.KEYWORD_ONLY, default))
    if given.kwarg:
        listed.append((given.kwarg, Parameter.VAR_KEYWORD, None))
    for argument, kind, default in listed:
        yield Parameter(
            argument.arg,
            kind,
            default=Parameter.empty if default is None else _value(place, default),
            annotation=ast.unparse(argument.annotation) if argument.annotation else "",
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
                return node if isinstance(line, ast.AugAssign) else getattr(line, "value", None) or node
        return node


def _find(module: str, name: str, hops: int) -> _Place:
    """What has this name in a module, or what the module imports under it."""
    path = _file(module)
    lines = list(_statements(_source(path).body))
    for node in reversed(lines):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _Place(path, module, node)
    imports = [
        (_imported_module(path, module, line), alias)
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    ]
    found = [(source, alias.name) for source, alias in imports if (alias.asname or alias.name) == name]
    found += [(source, name) for source, alias in imports if alias.name == "*"]
    for source, theirs in found if hops < _MOST_HOPS else ():
        with suppress(_NotThere):
            return _find(source, theirs, hops + 1)
    raise _NotThere(
        f"{module} has no class or function {name} in its source ({path.name}); correct the name, or give the class "
        "itself if it makes it"
    )


class _NotThere(ConfigError):
    """A module that has nothing of this name."""


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and those that it runs under a condition or in a `try`."""
    for line in body:
        yield line
        for block in ("body", "orelse", "finalbody") if isinstance(line, ast.If | ast.Try | ast.With) else ():
            yield from _statements(getattr(line, block, ()))
        for handler in line.handlers if isinstance(line, ast.Try) else ():
            yield from _statements(handler.body)


def _imported_module(path: Path, module: str, line: ast.stmt) -> str:
    """That of a line `from ... import`."""
    assert isinstance(line, ast.ImportFrom)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * line.level + (line.module or ""), package)


def _file(module: str) -> Path:
    """The source of a module, found without importing what it lies in."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was made without a spec
        spec = None
    if spec is None:
        raise ConfigError(
            f'no module {top} is here, which "{module}:..." names; install its package '
            f"(pip install {top.replace('_', '-')}), or start dtf where it lies"
        )
    origin = Path(spec.origin) if spec.origin else None
    if not rest and origin and origin.suffix == ".py":
        return origin
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]  # several: of a namespace package
    for folder in folders if rest else ():
        for path in (folder.joinpath(*rest, "__init__.py"), folder.joinpath(*rest).with_suffix(".py")):
            if path.is_file():
                return path
    where = " or ".join(map(str, folders)) or spec.origin or "a file"
    raise ConfigError(f"the source of {module} is not in {where}; name the class itself in place of text")


@lru_cache(maxsize=32)
def _source(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


# ------------------------------------------------------------ types of keys

_SCALARS: Mapping[str, type] = MappingProxyType(
    {"bool": bool, "int": int, "float": float, "str": str, "Path": str, "PathLike": str}
)
_PLAIN = (bool, int, float, str)
_LISTS = ("list", "List", "Sequence")
_TUPLES = ("tuple", "Tuple")


def config_type(argument: Parameter) -> Any:
    """The type of a config key for an argument, from its annotation's text and its default. None: no config holds it.

    A whole number without an annotation may become any number: `weight_decay=0`.
    """
    arms, default = _arms(_parsed(str(argument.annotation))), argument.default
    if default is UNKNOWN:
        return None
    if default is None:
        arms.append(NoneType)
    elif isinstance(default, list | tuple):
        item = _item(arms, default)
        if item is None:
            return None
        own = list[item] if isinstance(default, list) else tuple[item, ...]
        arms = [own, *(arm for arm in arms if get_origin(arm) is None and arm is not list)]
    elif default is not Parameter.empty:
        if type(default) not in _PLAIN:
            return None
        if not arms and type(default) is int:
            arms += [int, float]
        elif not _fits(default, arms):
            arms.append(type(default))
    known = list(dict.fromkeys(arms))
    return functools.reduce(operator.or_, known) if set(known) - {NoneType} else None


def typed_default(hint: Any, value: Any) -> Any:
    """A default as the number that its key's type says: 0 of a float is 0.0."""
    arms = get_args(hint)
    if isinstance(value, tuple | list):
        sequence = next((arm for arm in (hint, *arms) if get_origin(arm) in (list, tuple)), None)
        return type(value)(typed_default(get_args(sequence)[0], item) for item in value) if sequence else value
    return float(value) if type(value) is int and float in (hint, *arms) and int not in arms else value


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body if text else None
    except SyntaxError:
        return None


def _arms(node: ast.expr | None) -> list[Any]:
    """The types in an annotation that a config holds."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return [NoneType]
        return _arms(_parsed(node.value)) if isinstance(node.value, str) else []
    if name := _last_name(node):
        return [_SCALARS[name]] if name in _SCALARS else [list] if name in ("list", "List") else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_arms(node.left), *_arms(node.right)]
    if not isinstance(node, ast.Subscript):
        return []
    outer, inner = _last_name(node.value), node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Literal":
        return [type(each.value) for each in inner if isinstance(each, ast.Constant) and type(each.value) in _PLAIN]
    if outer in ("Optional", "Union", "Annotated"):
        parts = inner[:1] if outer == "Annotated" else inner
        return [*(arm for each in parts for arm in _arms(each)), *([NoneType] if outer == "Optional" else [])]
    items = [arm for each in inner for arm in _arms(each) if arm in _PLAIN]
    if not items or outer not in (*_LISTS, *_TUPLES):
        return []
    item = _one_type(set(items))
    return [] if item is None else [list[item]] if outer in _LISTS else [tuple[item, ...]]


def _last_name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _item(arms: Sequence[Any], values: Sequence[Any]) -> Any:
    """The type of the items of a default: as the annotation says, else that of its values. None: no config holds it."""
    said = {get_args(arm)[0] for arm in arms if get_origin(arm) in (list, tuple)}
    if any(type(value) not in _PLAIN for value in values):
        return None
    if len(said) == 1 and all(_fits(value, said) for value in values):
        return said.pop()
    return _one_type({type(value) for value in values})


def _one_type(found: set[type]) -> Any:
    return float if found == {int, float} else next(iter(found)) if len(found) == 1 else None


def _fits(value: Any, arms: Iterable[Any]) -> bool:
    return type(value) in arms or (type(value) is int and float in arms)
