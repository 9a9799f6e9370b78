"""The arguments of a class or function that a line of a plugin names, as config keys. Imports none of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, make_dataclass
from inspect import Parameter
from typing import Any

from dtf.api.registry import option
from dtf.core.arguments import Target, arguments_of, config_type, name_in_module, named, typed_default
from dtf.core.errors import ConfigError


def title_of(target: Target) -> str:
    """The last name of a class or function."""
    return name_in_module(target).rpartition(".")[2]


def argument_option(default: Any, doc: str) -> Any:
    """The field of an argument; `default` is Parameter.empty where it has to be given."""
    if default is Parameter.empty:
        return option(doc=doc)
    return option(factory=default.copy, doc=doc) if isinstance(default, list) else option(default=default, doc=doc)


def add_argument_keys(
    body: dict[str, Any], key: str, target: Target, bases: tuple[type, ...] = (), without: Collection[str] = ()
) -> None:
    """Put the node `key`, which has the arguments of `target` as keys beside those of `bases`, into the body of a class
    of a recipe, where there are any. Not those in `without`.

    An argument that is named as a key of the bases keeps its default. ConfigError for one that must be given and that
    no config holds.
    """
    title, taken = title_of(target), {field.name for base in bases for field in fields(base)}
    listed = []
    for argument in named(arguments_of(target)).values():
        hint, needed = config_type(argument), argument.default is Parameter.empty
        if argument.name in without:
            continue
        if hint is None and needed:
            raise ConfigError(
                f"{title}({argument.name}) has no default and no type that a config holds (bool, int, float, str, or a "
                "list of them); write a function that makes one and name it in place of the class"
            )
        if argument.name in taken and needed:
            raise ConfigError(
                f"the argument {argument.name} has no default, and recipe.{key}.{argument.name} is another key"
            )
        if hint is not None and argument.name not in taken:
            default = typed_default(hint, argument.default)
            listed.append((argument.name, hint, argument_option(default, doc=f"the argument {argument.name}")))
    if listed or bases:
        name, module = f"{title}Arguments", {"__module__": body["__module__"]}
        node = make_dataclass(name, listed, bases=bases, kw_only=True, namespace=module)
        body[key] = option(factory=node, doc=f"arguments of {title}")
        body.setdefault("__annotations__", {})[key] = node
