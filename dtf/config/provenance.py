"""Where the values of a config come from: files in the order in which Hydra merges them, then the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.types import RunMode

from dtf.api.registry import registered
from dtf.api.schema import UNSET, KeyProblem, option_node, show, to_plain
from dtf.config import presets
from dtf.config.defaults_lists import YamlFile
from dtf.config.dotted_keys import UNSAID, at, leaves, parts_of
from dtf.config.hydra_sources import CONF, Loader
from dtf.config.messages import COMMAND_LINE, in_quotes, is_set_by, with_suggestions
from dtf.config.option_files import ROOT_KEYS, is_class_file, option_of
from dtf.config.settings import Root
from dtf.core.text import display_path, suggest


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
    wanted, found = parts_of(key), list[Source]()
    for default in loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults:
        path, package = default.config_path or "", default.package.split(".") if default.package else []
        if wanted[: len(package)] != package:
            continue
        rest, read, own = wanted[len(package) :], reads.get(path), _class_values(path)
        by_class = at(own[1], rest) if own else UNSAID
        if read is not None:
            value, is_default = at(read.content, rest), _is_made(path, read)
            source = Source(path, value, read.file, display_path(read.file), is_default and value == by_class)
        else:
            value = by_class
            source = Source(path, value, None, f"the class {own[0]}" if own else path, True)
        if value is not UNSAID:
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
    value, parts = at(config, key.split(".")), key.split(".")
    if value is UNSAID:
        depth = next(depth for depth in reversed(range(len(parts))) if isinstance(at(config, parts[:depth]), dict))
        unknown = ".".join(parts[: depth + 1])
        beside = [".".join([*parts[:depth], str(name)]) for name in at(config, parts[:depth])]
        head = f"job.key={show(key)} is no known key; "
        plain = KeyProblem(unknown, head + suggest("", beside))
        meant = with_suggestions(plain, config)
        raise meant if meant is not plain else KeyProblem(unknown, head + suggest(unknown, beside))
    lines = []
    for name, leaf in leaves(value, key):
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


def check_texts(given: dict[Any, Any], config: dict[str, Any], sources_of: Callable[[str], list[Source]]) -> None:
    """Raise KeyProblem for a key of text with a number that was written otherwise than it reads, such as 1_000.

    `given`: what the places say, `config`: the same with the types of its keys.
    """
    for key, number in leaves(given):
        if type(number) is not int or not isinstance(at(config, parts_of(key)), str):
            continue
        for source in sources_of(key)[-1:]:
            said = _written(source.file, key.split(".")) if source.file else str(source.value)
            alike = rf"(?<![\w+.-]){number}(?![\w.])"
            if said is not None and "${" not in said and not re.search(alike, said):
                words = [word for word in re.findall(r"[\w.+-]+", said) if word.replace("_", "").lstrip("+-").isdigit()]
                shown = words[-1] if words else str(number)
                raise KeyProblem(key, f"{key}={shown} is the number {number}; {in_quotes(key, shown)}")


def check_unset(config: dict[Any, Any], reads: dict[str, YamlFile], sources_of: Callable[[str], list[Source]]) -> None:
    """Raise KeyProblem for `???` in a file of the user's that makes a key mandatory, as Hydra keeps the value that the
    key had before.
    """
    for path, read in reads.items():
        package = read.header.get("package") or option_of(path)[0]
        for key, value in leaves(read.content, "" if package == "_global_" else package):
            if value != UNSET or read.file.is_relative_to(CONF) or at(config, parts_of(key)) in (UNSET, UNSAID):
                continue
            if [source.value for source in sources_of(key)][-1:] == [UNSET]:
                raise KeyProblem(key, f"{key}=??? is mandatory; give {key}=VALUE")


def _line(file: Path, wanted: list[str]) -> int | None:
    """The line of a file, from 1, that holds the longest end of a dotted key."""
    entry = _entry(file, wanted)
    return entry[0].start_mark.line + 1 if entry else None


def _written(file: Path, wanted: list[str]) -> str | None:
    """The value of a key as the file has it, without quotes."""
    entry = _entry(file, wanted)
    return str(entry[1].value) if entry else None


def _entry(file: Path, wanted: list[str]) -> tuple[Any, Any] | None:
    """The nodes of YAML, name and value, to which the longest end of a dotted key leads in a file."""
    import yaml

    with file.open(encoding="utf-8") as text:
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for first in range(len(wanted)):
        node, entry = root, None
        for part in wanted[first:]:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            entry = next(((name, inner) for name, inner in pairs if name.value == part), None)
            if entry is None:
                break
            node = entry[1]
        if entry is not None:
            return entry
    return None


def _class_values(config_path: str) -> tuple[str, dict[str, Any]] | None:
    """(name, values) of the class behind an option's path; None for a path of no class."""
    if config_path == ROOT_KEYS:
        return "Root", to_plain(Root())
    group, name = option_of(config_path)
    cls = registered(group).get(name.removeprefix(f"{presets.FOLDER}/"))
    if cls is None:
        return None
    said = f"{cls.__module__}.{cls.__qualname__}"
    if name not in registered(group):
        return f"{said}.presets", presets.preset_values(group, name.removeprefix(f"{presets.FOLDER}/"))
    return said, option_node(group, name)


def _is_made(config_path: str, read: YamlFile) -> bool:
    group, name = option_of(config_path)
    return is_class_file(group, name, read.file, CONF) or read.file == CONF / f"{ROOT_KEYS}.yaml"
