"""Config nodes as classes see them: the keys of a class, and typed objects from plain values.

Knows nothing of Hydra, files or command lines. Ranks use it to rebuild objects from JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import types
from dataclasses import MISSING, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from dtf.api.registry import Range, lookup
from dtf.core.errors import ConfigError
from dtf.core.renamed import refused_keys
from dtf.core.text import suggest

if TYPE_CHECKING:
    from typing_extensions import TypeIs

UNSET = "???"
"""The value of a mandatory key that has none yet."""

RESERVED = "_target_"
"""A key that no config may hold: a config is data, and names no class by its import path."""

_EXACT = 2**53  # the whole numbers that a float holds
_NAMES = {bool: "bool", int: "int", float: "float", str: "text", type(None): "null"}


class Interpolated(str):
    """Text that an interpolation gave, such as an environment variable's. A key that takes no text reads it as a
    number, a switch or null.
    """


class KeyProblem(ConfigError):
    """A key or value that fits no class. The code that read the files adds which of them set it."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class Key:
    """One field of a class as a config key."""

    name: str
    hint: Any
    default: Any  # plain: JSON types only; UNSET when there is none
    doc: str
    unit: str
    range: Range


@cache
def keys(cls: type) -> tuple[Key, ...]:
    """The config keys of a dataclass, in the order of its fields.

    ConfigError for a class that no config can describe.
    """
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__}: {error}; types of config keys must be importable at run time"
        ) from error
    described = []
    for field in dataclasses.fields(cls):
        if not _describable(hints[field.name]):
            raise ConfigError(
                f"{cls.__module__}.{cls.__qualname__}.{field.name}: no config can hold a {hints[field.name]}; use "
                "bool, int, float, str, Enum, "
                "Literal, list, dict, a dataclass, or a union of them"
            )
        if is_node(field.default_factory):
            plain = node(field.default_factory)  # not called: it may have mandatory keys
        else:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            plain = UNSET if default is MISSING else to_plain(default)
        metadata = field.metadata
        described.append(
            Key(
                field.name,
                hints[field.name],
                plain,
                metadata.get("doc", ""),
                metadata.get("unit", ""),
                metadata.get("range", Range()),
            )
        )
    return tuple(described)


def node(cls: type) -> dict[str, Any]:
    """The default config node of a dataclass; plain, and a new one each time."""
    return {
        key.name: node(key.hint) if is_node(key.hint) and key.default == UNSET else _copy(key.default)
        for key in keys(cls)
    }


def is_node(hint: Any) -> TypeIs[type]:
    """Whether a type is a group of keys: a dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def option_node(group: str, name: str) -> dict[str, Any]:
    """The default config node of a registered class, with its `name`."""
    cls = lookup(group, name)
    if any(key.name == "name" for key in keys(cls)):
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__}.name: the key `name` holds the option's name in every group; rename "
            "the field"
        )
    return {"name": name, **node(cls)}


def to_plain(value: Any) -> Any:
    """A typed value as JSON types: enum members as their values, dataclasses as dicts."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def coerce(hint: Any, value: Any, key: str) -> Any:
    """`value` as plain JSON of the type `hint`. UNSET stays as it is. A member of an enum may be written as its value
    or its name; the result is its value.

    KeyProblem for any `value` that does not fit. `key`: the dotted key, for the message.
    """
    if isinstance(value, str) and value == UNSET:
        return UNSET
    if isinstance(value, Interpolated):
        value = _read(hint, str(value))
    if type(value) is float and not math.isfinite(value) and (hint is Any or float in (hint, *get_args(hint))):
        raise KeyProblem(key, f"{key}={show(value)} must be a finite number")  # JSON has no other
    if hint is Any:
        return value
    if is_node(hint):
        return _fit_node(hint, value, key)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _fit_union(hint, arguments, value, key)
    if origin is Literal and _accepts(hint, value):
        return value
    if (origin or hint) in (list, tuple) and isinstance(value, list):
        item = arguments[0] if arguments else Any
        return [coerce(item, entry, f"{key}[{index}]") for index, entry in enumerate(value)]
    if (origin or hint) is dict and isinstance(value, dict):
        return {
            _text_key(name, key): coerce(arguments[1] if arguments else Any, entry, f"{key}.{name}")
            for name, entry in value.items()
        }
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if isinstance(value, str) and value in _members(hint):
            return value
        if isinstance(value, str) and value in _spellings(hint):
            return str(hint[value].value)
        if isinstance(value, dict) and value:
            inner = f"{key}.{show(next(iter(value)))}"
            raise KeyProblem(
                inner, f"{inner} is no known key; choices: none, as {key} is one of {', '.join(sorted(_members(hint)))}"
            )
        raise KeyProblem(key, f"{key}={show(value)} is no choice; {suggest(show(value), _spellings(hint))}")
    if hint is str and type(value) is str:
        return _text(_at_home(value), key)
    if hint in (bool, int, float, type(None)) and type(value) is hint:
        return value
    if hint is float and type(value) is int and abs(value) <= _EXACT:
        return float(value)
    if hint is str and type(value) is int:
        return str(value)  # run.name=7: the command line makes a number of it
    raise _unfit(hint, value, key)


def build(hint: Any, value: Any) -> Any:
    """The typed object of a value that `coerce` returned."""
    if is_node(hint):
        return hint(**{key.name: build(key.hint, value[key.name]) for key in keys(hint)})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return build(next(arm for arm in arguments if _accepts(arm, value)), value)
    if origin in (list, tuple):
        made = [build(arguments[0] if arguments else Any, entry) for entry in value]
        return tuple(made) if origin is tuple else made
    if origin is dict:
        return {name: build(arguments[1], entry) for name, entry in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _members(hint)[value]
    return value


def coerce_option(group: str, value: Any, key: str) -> dict[str, Any]:
    """`coerce` for the node of a registered class, whose key `name` says which class."""
    if not isinstance(value, dict):
        raise KeyProblem(key, f"{key}={show(value)} is no option's node; choose with {group}=NAME")
    rest = dict(value)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        article, here = "an" if group[0] in "aeiou" else "a", "recipe" if group == "recipe" else "_here_"
        rule = f"{article} {group} file starts from one: defaults: [schema/NAME@{here}, _self_]"
        if isinstance(name, bool):
            rule = "YAML reads off, no, on and yes without quotes as false and true; quote it: name: 'off'"
        raise KeyProblem(f"{key}.name", f"{key}.name={show(name)} names no registered class; {rule}")
    try:
        cls = lookup(group, name)
    except ConfigError as error:
        raise KeyProblem(f"{key}.name", str(error)) from error
    if refused := refused_keys(group, name, map(str, rest)):
        raise KeyProblem(*refused)
    return {"name": name, **_fit_node(cls, rest, key)}


def build_option(group: str, value: dict[str, Any]) -> Any:
    """The typed object of a node that `coerce_option` returned."""
    return build(lookup(group, value["name"]), value)


def unset(value: Any, key: str = "") -> list[str]:
    """Dotted keys below `key` that still hold UNSET."""
    if isinstance(value, dict):
        return [path for name, entry in value.items() for path in unset(entry, f"{key}.{name}" if key else str(name))]
    if isinstance(value, list):
        return [path for index, entry in enumerate(value) for path in unset(entry, f"{key}[{index}]")]
    return [key] if isinstance(value, str) and value == UNSET else []


def type_text(hint: Any) -> str:
    """A type in words of a config: `int | null`, `list of text`, `partial | fill | drop`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return "value"
    if is_node(hint):
        return "group of keys"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(arm) for arm in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"list of {type_text(arguments[0])}" if arguments else "list"
    if origin is dict:
        return f"mapping of {type_text(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(_members(hint))
    return _NAMES.get(hint, str(hint))


def show(value: Any) -> str:
    """A value as one types it on the command line, cut at 80 characters, with control characters escaped."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = (
        f"[{', '.join(map(show, value[:8]))}]"
        if isinstance(value, list)
        else "{...}"
        if isinstance(value, dict)
        else str(value)
    )
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fit_node(cls: type, value: Any, key: str) -> dict[str, Any]:
    known = {field.name: field for field in keys(cls)}
    if not isinstance(value, dict):
        raise KeyProblem(key, f"{key}={show(value)} is no group of keys; {suggest('', known)}")
    for name in value:
        if name not in known:
            inner = f"{key}.{name}" if key else show(name)
            raise KeyProblem(inner, f"{inner}={show(value[name])} is no known key; {suggest(str(name), known)}")
    fitted = {}
    for name, field in known.items():
        inner = f"{key}.{name}" if key else name
        fitted[name] = coerce(field.hint, value[name], inner) if name in value else _copy(field.default)
        _check_range(field.range, fitted[name], inner)
    return fitted


def _read(hint: Any, text: str) -> Any:
    """`text` as the first of the types that `hint` names which it can be; itself where it is none of them."""
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if str in arms or Any in arms:
        return text
    for arm in arms:
        if arm is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if arm is type(None) and text.lower() in ("null", "none", ""):
            return None
        if arm in (int, float):
            with contextlib.suppress(ValueError):
                return arm(text)
    return text


def _check_range(wanted: Range, value: Any, key: str) -> None:
    if isinstance(value, list):
        for index, entry in enumerate(value):
            _check_range(wanted, entry, f"{key}[{index}]")
    elif isinstance(value, dict):
        for name, entry in value.items():
            _check_range(wanted, entry, f"{key}.{name}")
    elif type(value) in (int, float) and value not in wanted:
        raise KeyProblem(key, f"{key}={show(value)} must be {wanted}")


def _fit_union(hint: Any, arms: tuple[Any, ...], value: Any, key: str) -> Any:
    for arm in arms:
        if _accepts(arm, value):
            return coerce(arm, value, key)
    problems = []
    for arm in arms:
        try:
            return coerce(arm, value, key)
        except KeyProblem as problem:
            problems.append(problem)
    inner = [p for arm, p in zip(arms, problems, strict=True) if p.key != key or isinstance(arm, enum.EnumType)]
    raise inner[0] if inner else _unfit(hint, value, key)  # of what is inside an arm that fitted, or of its choices


def _unfit(hint: Any, value: Any, key: str) -> KeyProblem:
    """Says what to write where a list is wanted, and the value could be an entry of it."""
    said = f"{key}={show(value)} is not of type {type_text(hint)}"
    for arm in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if (get_origin(arm) or arm) in (list, tuple) and not isinstance(value, dict | list | None):
            with contextlib.suppress(KeyProblem):
                coerce(next(iter(get_args(arm)), Any), value, key)
                return KeyProblem(key, f"{said}; write [{show(value)}]")
    return KeyProblem(key, said)


def _describable(hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal or hint is Any or hint in _NAMES or is_node(hint):
        return True
    if origin in (Union, types.UnionType, list, dict, tuple) and arguments:
        inner = arguments[1:] if origin is dict else [arm for arm in arguments if arm is not ...]
        return all(map(_describable, inner))
    return hint in (list, dict) or (isinstance(hint, type) and issubclass(hint, enum.Enum))


def _accepts(hint: Any, value: Any) -> bool:
    """Whether a plain value is of this arm of a union as it stands."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return type(value) in map(type, get_args(hint)) and value in get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return isinstance(value, str) and value in _members(hint)
    if is_node(hint):
        return isinstance(value, dict) and set(value) <= {key.name for key in keys(hint)}
    return type(value) is ({tuple: list}.get(origin, origin) or hint)


def _members(hint: type[enum.Enum]) -> dict[str, enum.Enum]:
    """The members of an enum by their values. A name may differ from its value, as `async` is a keyword of Python."""
    return {str(member.value): member for member in hint}


def _spellings(hint: type[enum.Enum]) -> list[str]:
    """All that a config may write for a member: values, and names that are more than a value with an underscore."""
    names = [name for name, member in hint.__members__.items() if name != f"{member.value}_"]
    return list(dict.fromkeys([*_members(hint), *names]))


def _text_key(name: Any, key: str) -> str:
    if not isinstance(name, str | int | float | bool):
        raise KeyProblem(key, f"{key}: the key {show(name)} is no text")
    return _text(str(name), key)


def _text(value: str, key: str) -> str:
    """Text that can be a path or an environment variable, as most of it becomes one."""
    if "\0" in value or any("\ud800" <= char < "\udc80" or "\udcff" < char <= "\udfff" for char in value):
        raise KeyProblem(key, f"{key}={show(value)} must be text without NUL and surrogate characters")
    return value


def _at_home(text: str) -> str:
    """`~` and `~/...` as a shell would read them: shells leave them alone behind `key=`."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def _copy(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _copy(value) for key, value in plain.items()}
    return [_copy(value) for value in plain] if isinstance(plain, list) else plain
