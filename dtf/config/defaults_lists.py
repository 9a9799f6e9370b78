"""YAML files as they were read, and checks of their defaults lists, which Hydra follows whether they end or not.

Says nothing about keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtf.api.schema import show
from dtf.config.option_files import SCHEMA, option_of
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError

ROOT = "config"
"""Name of dtf's own root config, conf/config.yaml."""


@dataclass(frozen=True)
class YamlFile:
    """A YAML file as it was read."""

    file: Path
    content: dict[Any, Any]  # plain, interpolations as written, without its defaults list
    defaults: list[Any]  # as written
    header: dict[str, str | None]


def check_defaults(file: Path, config_path: str, defaults: Any) -> None:
    """Raise ConfigError for a defaults list that is none, names no option, or puts a base in a node of its own."""
    group, name = option_of(config_path)
    here = "@recipe" if group == "recipe" else "@_here_"
    if defaults is not None and not isinstance(defaults, list):
        example = f"{SCHEMA}/NAME{here}" if group in GROUPS and name else ROOT
        raise ConfigError(f"{file}: defaults={show(defaults)} must be a list, such as defaults: [{example}, _self_]")
    for entry in defaults or []:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            for option in value if isinstance(value, list) else [value]:
                if not isinstance(option, str) and (option is not None or entry is None):
                    raise ConfigError(
                        f"{file}: {show(option)} in its defaults list is no name of an option; quote a name that YAML "
                        "reads as something else, such as 'off'"
                    )
    for entry in (defaults or []) if group in GROUPS and name else []:
        if isinstance(entry, str) and entry.startswith(f"{SCHEMA}/") and "@" not in entry:
            raise ConfigError(
                f"{file}: {entry} in its defaults list puts the keys into {group}.{SCHEMA}; write {entry}{here}"
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


def _ways(path: str, reads: Mapping[str, YamlFile]) -> Iterator[list[str]]:
    """The paths of options on the way to each that the defaults list of `path` names, directly or by another file."""
    ways, seen = [[name] for name in _named(path, reads)], set()
    while ways:
        way = ways.pop(0)
        yield way
        if way[-1] not in seen:
            seen.add(way[-1])
            ways += [[*way, name] for name in _named(way[-1], reads)]


def _named(path: str, reads: Mapping[str, YamlFile]) -> list[str]:
    """The paths of the options that the defaults list of a file names, but for those it only overrides."""
    folder, _, _ = path.rpartition("/")
    found = []
    for entry in reads[path].defaults if path in reads else []:
        pairs = entry.items() if isinstance(entry, dict) else [("", entry)]
        for key, value in pairs:
            group = str(key).removeprefix("optional ").split("@")[0].strip()
            if group.startswith("override ") or value is None or value == "_self_":
                continue
            for name in value if isinstance(value, list) else [value]:
                text = f"{group}/{str(name).split('@')[0]}" if group else str(name).split("@")[0]
                found.append(text.strip("/") if text.startswith("/") or not folder else f"{folder}/{text}")
    return [name.removesuffix(".yaml") for name in found]
