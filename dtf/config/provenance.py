"""Where the values of a config come from: files in the order in which Hydra merges them, then the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.types import RunMode

from dtf.api.registry import registered
from dtf.api.schema import KeyProblem, option_node, show, to_plain
from dtf.config.defaults_lists import YamlFile
from dtf.config.hydra_sources import CONF, Loader
from dtf.config.messages import COMMAND_LINE, display_path, is_set_by, with_suggestions
from dtf.config.option_files import ROOT_KEYS, is_class_file, option_of
from dtf.config.settings import Root
from dtf.core.text import suggest

_UNSAID = object()


class Source(NamedTuple):
    """One place that gives a key a value."""

    option: str  # the path of the option that it is, such as `recipe/mine`; empty: the command line
    value: Any
    file: Path | None  # None: no file but a class, or the command line
    place: str  # without the line of a file
    is_default: bool  # the value is that of the class


NO_EFFECT = Source("", "its default", None, "it has no effect beside what the command line chooses", True)
"""The last place of a key that the command line makes one without effect."""


def sources(
    key: str, config_name: str, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]
) -> list[Source]:
    """The places that give a key a value, a part of it or a node that has it; the last one counts."""
    wanted, found = re.findall(r"[^.\[\]]+", key), list[Source]()
    for default in loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults:
        path, package = default.config_path or "", default.package.split(".") if default.package else []
        if wanted[: len(package)] != package:
            continue
        rest, read, own = wanted[len(package) :], reads.get(path), _class_values(path)
        by_class = _at(own[1], rest) if own else _UNSAID
        if read is not None:
            value, is_default = _at(read.content, rest), _is_made(path, read)
            source = Source(path, value, read.file, display_path(read.file), is_default and value == by_class)
        else:
            value = by_class
            source = Source(path, value, None, f"the class {own[0]}" if own else path, True)
        if value is not _UNSAID:
            found.append(source)
    if is_set_by(key, overrides, loader):
        texts = [text for text in overrides if is_set_by(key, [text], loader)]
        found += [Source("", text, None, COMMAND_LINE, False) for text in texts]
    return found


def origin(key: str, config_name: str, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> str:
    """Where a key got its value: `on the command line`, `in FILE`, or "" when it is a default."""
    if is_set_by(key, overrides, loader):  # most often; and the rest asks Hydra once more
        return COMMAND_LINE
    found = sources(key, config_name, overrides, loader, reads)
    if not found and key.endswith(".name"):  # it is missing: in the file of the node
        found = [source for source in sources(key[:-5], config_name, overrides, loader, reads) if source.file]
    return f"in {found[-1].place}" if found and not found[-1].is_default else ""


def explain(config: dict[str, Any], sources_of: Callable[[str], list[Source]], key: str) -> list[str]:
    """Lines that say the value of a key and which places give it one, in order; of a node, all its keys.

    ConfigError for a key that the config has not.
    """
    value, parts = _at(config, key.split(".")), key.split(".")
    if value is _UNSAID:
        depth = next(depth for depth in reversed(range(len(parts))) if isinstance(_at(config, parts[:depth]), dict))
        unknown = ".".join(parts[: depth + 1])
        beside = [".".join([*parts[:depth], str(name)]) for name in _at(config, parts[:depth])]
        head = f"job.key={show(key)} is no known key; "
        plain = KeyProblem(unknown, head + suggest("", beside))
        meant = with_suggestions(plain, config)
        raise meant if meant is not plain else KeyProblem(unknown, head + suggest(unknown, beside))
    lines = []
    for name, leaf in _leaves(value, key):
        lines.append(f"{name}={show(leaf)}")
        places = sources_of(name)
        texts = [(_said(each), _where(each, name)) for each in places] or [(show(leaf), "its default")]
        width = max(len(text) for text, _ in texts)
        for number, (text, where) in enumerate(texts, 1):
            lines.append(f"  {text.ljust(width)}  {where}{'  (counts)' if number == len(texts) > 1 else ''}")
    return lines


def _said(source: Source) -> str:
    return show(source.value) if source.option else source.value


def _where(source: Source, key: str) -> str:
    """The place with its line, if it has one."""
    if source.file is None:
        return source.place
    inside = source.file.is_relative_to(CONF)
    place = f"dtf's conf/{source.file.relative_to(CONF)}" if inside else source.place
    line = _line(source.file, key.split("."))
    return f"{place}, line {line}" if line else place


def _line(file: Path, wanted: list[str]) -> int | None:
    """The line of a file, from 1, that holds the longest end of a dotted key."""
    import yaml

    with file.open(encoding="utf-8") as text:
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for first in range(len(wanted)):
        node, line = root, None
        for part in wanted[first:]:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            entry = next(((name, inner) for name, inner in pairs if name.value == part), None)
            if entry is None:
                line = None
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        if line is not None:
            return line
    return None


def _class_values(config_path: str) -> tuple[str, dict[str, Any]] | None:
    """(name, values) of the class behind an option's path; None for a path of no class."""
    if config_path == ROOT_KEYS:
        return "Root", to_plain(Root())
    group, name = option_of(config_path)
    cls = registered(group).get(name)
    if cls is None:
        return None
    return f"{cls.__module__}.{cls.__qualname__}", option_node(group, name)


def _is_made(config_path: str, read: YamlFile) -> bool:
    group, name = option_of(config_path)
    return is_class_file(group, name, read.file, CONF) or read.file == CONF / f"{ROOT_KEYS}.yaml"


def _at(content: Any, parts: Sequence[str]) -> Any:
    """The value at a path, or `_UNSAID`."""
    for part in parts:
        if isinstance(content, dict):
            content = {str(name): entry for name, entry in content.items()}.get(part, _UNSAID)
        elif isinstance(content, list) and part.isdecimal() and int(part) < len(content):
            content = content[int(part)]
        else:
            return _UNSAID
    return content


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
