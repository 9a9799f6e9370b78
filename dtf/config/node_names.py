"""Checks that the `name` in a node of a config is that of the class whose keys it holds: Hydra merges it as any key."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dtf.api.registry import base_of, lookup, registered
from dtf.api.schema import KeyProblem, option_node, show
from dtf.config.option_files import SCHEMA, is_base, option_of
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from dtf.config.defaults_lists import YamlFile
    from dtf.config.provenance import Source


def check_nodes(
    config: Mapping[str, Any], reads: Mapping[str, YamlFile], sources_of: Callable[[str], list[Source]]
) -> None:
    """Raise ConfigError for an observer's file without its package, and KeyProblem for a `name` in a file that is not
    that of the class from which its node starts.
    """
    observers = config.get("observer")
    if isinstance(observers, dict) and not all(isinstance(node, dict) for node in observers.values()):
        for path, read in reads.items():
            if path.startswith("observer/") and not is_base(path) and not read.header.get("package"):
                raise ConfigError(
                    f"{read.file} puts its keys beside the names of observers; begin it with the line # @package "
                    f"{path.replace('/', '.')}"
                )
    for key in {key: None for path, read in reads.items() for key in _named_nodes(path, read)}:
        for before, after in itertools.pairwise(sources_of(key)):
            if after.value == before.value or not after.option:
                continue
            group, name = option_of(after.option)
            if after.value == name and name in registered(group):
                continue  # another base, with all of its keys
            chosen = key.split(".")[0]
            other = f"{SCHEMA}/{after.value}@_here_" if group == chosen else f"override /{chosen}: {after.value}"
            raise KeyProblem(
                key,
                f"{key}={show(after.value)} is another class than {show(before.value)}, from which the node starts; "
                f"leave the name out{'' if chosen == 'observer' else f', or write {other} into the defaults list'}",
            )


def refuse_bare_variant(config: Mapping[str, Any]) -> None:
    """Raise KeyProblem for an option that gives a class other defaults, where these are set back to those of the class:
    the config would say another name than what runs.
    """
    for group in GROUPS:
        node = config[group]
        name = node.get("name")
        base = base_of(group, name) if name in registered(group) else name
        if base == name:
            continue
        plain, own = option_node(group, base), option_node(group, name)
        differ = [
            field.name for field in dataclasses.fields(lookup(group, name)) if own[field.name] != plain[field.name]
        ]
        if differ and all(node[key] == plain[key] for key in differ):
            given = " ".join(f"{group}.{key}={show(node[key])}" for key in differ)
            raise KeyProblem(
                f"{group}.{differ[0]}", f"{given} makes {group}={base} of {group}={name}; choose {group}={base}"
            )


def _named_nodes(path: str, read: YamlFile) -> Iterator[str]:
    """The keys `<node>.name` that a file sets beside what it starts from."""
    group, name = option_of(path)
    package = read.header.get("package")
    if package != "_global_" and group in GROUPS and name:
        if "name" in read.content and (read.defaults or read.content["name"] != name):
            yield f"{package or group}.name"
        return
    for chosen in GROUPS:
        node = read.content.get(chosen)
        parts = node if chosen == "observer" and isinstance(node, dict) else {"": node}
        for inner, part in parts.items():
            if isinstance(part, dict) and "name" in part:
                yield f"{chosen}.{inner}.name" if inner else f"{chosen}.name"
