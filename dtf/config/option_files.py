"""The text of a YAML file with every key of an option: made from its class, read by people and by Hydra."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from dtf.api.registry import lookup, registered
from dtf.api.schema import Key, is_node, keys, option_node, to_plain
from dtf.config.settings import GROUPS, Root

SCHEMA = "schema"
"""Folder of the files of classes whose name a file of other content has, such as a recipe; see `file_of`."""

ROOT_KEYS = f"{SCHEMA}/root"
"""The file of the keys outside groups, without `.yaml`."""

_WIDTH = 120
_SHIPPED = "dtf."


def option_text(group: str, name: str) -> str:
    """The file of an option, from its registered class. ConfigError for a name that is not registered."""
    cls = lookup(group, name)
    package = [f"# @package observer.{name}"] if group == "observer" else []
    summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    values = option_node(group, name)
    return _text([*package, *_comment(summary, ""), f"name: {_scalar(name)}", *_lines(cls, values, "")])


def root_text() -> str:
    """The file of the keys outside groups."""
    head = ["# @package _global_", *_comment("Keys outside groups.", "")]
    return _text([*head, *_lines(Root, to_plain(Root()), "")])


def files(conf: Path) -> dict[Path, str]:
    """Path -> text of all files that are made from dtf's own classes. `conf`: the folder of the groups."""
    made = {conf / f"{ROOT_KEYS}.yaml": root_text()}
    for group in GROUPS:
        for name, cls in registered(group).items():
            if cls.__module__.startswith(_SHIPPED):
                made[conf / file_of(group, name)] = option_text(group, name)
    return made


def file_of(group: str, name: str) -> str:
    """The file of an option in the folder of the groups. Recipes' files of these names choose other options too."""
    return f"{group}/{SCHEMA}/{name}.yaml" if group == "recipe" else f"{group}/{name}.yaml"


def option_of(config_path: str) -> tuple[str, str]:
    """(group, name) of an option or base by its path, such as `strategy/ddp` or `strategy/schema/ddp`."""
    group, _, name = config_path.removesuffix(".yaml").strip("/").replace(f"/{SCHEMA}/", "/").partition("/")
    return group, name


def is_base(config_path: str) -> bool:
    """Whether a path is one of a base, which another file starts from."""
    return SCHEMA in config_path.split("/")[:-1]


def is_class_file(group: str, name: str, file: Path, conf: Path) -> bool:
    """Whether a file that Hydra read as an option is the one that is made from its class."""
    return name in registered(group) and file == conf / file_of(group, name)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _lines(cls: type, values: dict[str, Any], indent: str) -> Iterator[str]:
    for key in keys(cls):
        value = values[key.name]
        yield from _comment(_help(key), indent)
        if is_node(key.hint) and isinstance(value, dict):
            yield f"{indent}{key.name}:"
            yield from _lines(key.hint, value, f"{indent}  ")
            continue
        yield f"{indent}{key.name}: {_scalar(value)}"
        for node in [arm for arm in get_args(key.hint) if is_node(arm)] if value is None else []:
            inner = _lines(node, {each.name: each.default for each in keys(node)}, f"{indent}  ")
            yield from (f"{indent}# {line.removeprefix(indent)}" for line in inner)


def _help(key: Key) -> str:
    """The line of help, the unit and the range of a key."""
    facts = [" ".join(key.doc.split()), f"[{key.unit}]" if key.unit else "", f"({key.range})" if str(key.range) else ""]
    return " ".join(filter(None, facts))


def _comment(text: str, indent: str) -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(
        text, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False, break_on_hyphens=False
    )


def _scalar(value: Any) -> str:
    """A plain value in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
