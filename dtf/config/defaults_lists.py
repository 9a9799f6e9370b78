"""YAML files as they were read, and checks of what Hydra follows without a word: defaults lists and package lines.

Says nothing about the keys of options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtf.api.schema import show
from dtf.config.option_files import SCHEMA, option_of
from dtf.config.settings import EXPERIMENT, GROUPS
from dtf.core.errors import ConfigError

ROOT = "config"
"""Name of dtf's own root config, conf/config.yaml."""

_PACKAGE = re.compile(r"#\s*@package\b")


@dataclass(frozen=True)
class YamlFile:
    """A YAML file as it was read."""

    file: Path
    content: dict[Any, Any]  # plain, interpolations as written, without its defaults list
    defaults: list[Any]  # as written
    header: dict[str, str | None]


def check_defaults(file: Path, config_path: str, defaults: Any) -> None:
    """Raise ConfigError for a defaults list that is none, names no option, puts a base in a node of its own, or chooses
    an experiment for another option.
    """
    group, name = option_of(config_path)
    here = "@recipe" if group == "recipe" else "@_here_"
    if not isinstance(defaults, list):
        example = f"{SCHEMA}/NAME{here}" if group in GROUPS and name else ROOT
        example = "[_self_, override /strategy: NAME]" if group == EXPERIMENT else f"[{example}, _self_]"
        raise ConfigError(f"{file}: defaults={show(defaults)} must be a list, such as defaults: {example}")
    for entry in defaults:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            for option in value if isinstance(value, list) else [value]:
                if not isinstance(option, str) and (option is not None or entry is None):
                    raise ConfigError(
                        f"{file}: {show(option)} in its defaults list is no name of an option; quote a name that YAML "
                        "reads as something else, such as 'off'"
                    )
        if isinstance(entry, str) and entry.startswith(("optional ", "override ")):
            word, *_, last = entry.split(" ")
            remedy = f"leave {word} out: {last}" if word == "optional" else f"write {word} /GROUP: NAME"
            raise ConfigError(f"{file}: {show(entry)} in its defaults list: {word} goes before GROUP: OPTION; {remedy}")
        bare = isinstance(entry, str) and entry.startswith(f"{SCHEMA}/") and "@" not in entry
        if bare and group in GROUPS and name:
            raise ConfigError(
                f"{file}: {entry} in its defaults list puts the keys into {group}.{SCHEMA}; write {entry}{here}"
            )
    for _, chosen, value in choices_in(config_path, defaults):
        if name and chosen in (EXPERIMENT, f"{group}/{EXPERIMENT}"):
            raise ConfigError(f"{file}: {_no_experiment(group, value)}")


def _no_experiment(group: str, value: Any) -> str:
    start = f", or start from it: defaults: [{show(value)}, _self_]" if group == EXPERIMENT else ""
    return (
        f"{EXPERIMENT}: {show(value)} has no effect here, as an experiment comes after all other options; choose it on "
        f"the command line or in a root of yours{start}"
    )


def refuse_choice_as_key(file: Path, config_path: str, package: str | None, content: Mapping[Any, Any]) -> None:
    """Raise ConfigError for a file that speaks for the whole config and has the name of an option as the value of a
    key.
    """
    group, name = option_of(config_path)
    for key in (*GROUPS, EXPERIMENT) if package == "_global_" or not name else ():
        value = content.get(key)
        if not isinstance(value, str | list) or "${" in value:
            continue
        if key == EXPERIMENT and name:
            raise ConfigError(f"{file}: {_no_experiment(group, value)}")
        raise ConfigError(
            f"{file}: {key}={show(value)} is no group of keys; to choose an option, write override /{key}: "
            f"{show(value)} at the end of its defaults list"
        )


def check_package(file: Path, config_path: str, package: str | None, text: str) -> None:
    """Raise ConfigError for a line `# @package` that Hydra does not read, or that names the place of other options."""
    group, name = option_of(config_path)
    if package is None:
        for number, line in enumerate(text.splitlines(), 1):
            if _PACKAGE.match(line):
                raise ConfigError(
                    f"{file}, line {number}: {line.strip()} is read only above all other lines; move it up"
                )
    elif group in GROUPS and name and package.split(".")[0] not in (group, "_global_"):
        raise ConfigError(
            f"{file}: # @package {package} puts the keys of {group}={name} elsewhere; leave the line out, or write "
            f"# @package _global_ to set keys of several groups"
        )


def refuse_cycle(path: str, reads: Mapping[str, YamlFile]) -> None:
    """Raise ConfigError where the defaults list of a file leads back to it, by way of files that were read before."""
    for way in _ways(path, reads):
        if way[-1] == path:
            between = f", by way of {' and '.join(way[:-1])}" if len(way) > 1 else ""
            raise ConfigError(
                f"{reads[path].file}: its defaults list leads back to the file itself ({path}){between}; take that "
                f"entry out, or start from a class: defaults: [{SCHEMA}/NAME@_here_, _self_]"
            )


def require_base(config_name: str, reads: Mapping[str, YamlFile]) -> None:
    """Raise ConfigError for a root of the user's that neither starts from dtf's nor has settings of Hydra as that."""
    root = config_name.removesuffix(".yaml")
    if root not in reads or root == ROOT or any("hydra" in read.content for read in reads.values()):
        return
    if not any(way[-1] == ROOT for way in _ways(root, reads)):
        raise ConfigError(
            f"{reads[root].file}: its defaults list has no `{ROOT}`, dtf's own root, from which a root of yours "
            f"starts; begin it with defaults: [{ROOT}, _self_]"
        )


def choices_in(path: str, defaults: list[Any]) -> Iterator[tuple[bool, str, Any]]:
    """(whether it is an override, group, option or options) of the entries of a file's defaults list with a group."""
    folder = path.rpartition("/")[0]
    for entry in defaults:
        for key, value in entry.items() if isinstance(entry, dict) else ():
            *words, group = str(key).split("@")[0].split() or [""]
            whole = group.strip("/") if group.startswith("/") or not folder else f"{folder}/{group}"
            yield "override" in words, whole, value


def named_by(path: str, reads: Mapping[str, YamlFile], overrides: bool = False) -> list[str]:
    """The paths of the options that the defaults list of a file names; with those it only overrides where asked."""
    folder, defaults = path.rpartition("/")[0], reads[path].defaults if path in reads else []
    found = []
    for is_override, group, value in choices_in(path, defaults):
        if value is not None and (overrides or not is_override):
            found += [f"{group}/{name}" for name in (value if isinstance(value, list) else [value])]
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            found.append(entry.strip("/") if entry.startswith("/") or not folder else f"{folder}/{entry}")
    return [str(name).split("@")[0].removesuffix(".yaml") for name in found]


def _ways(path: str, reads: Mapping[str, YamlFile]) -> Iterator[list[str]]:
    """The paths of options on the way to each that the defaults list of `path` names, directly or by another file."""
    ways, seen = [[name] for name in named_by(path, reads)], set()
    while ways:
        way = ways.pop(0)
        yield way
        if way[-1] not in seen:
            seen.add(way[-1])
            ways += [[*way, name] for name in named_by(way[-1], reads)]
