"""YAML files as they were read, and checks of what Hydra follows without a word: defaults lists and package lines.

Says nothing about the keys of options.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtf.api.registry import registered
from dtf.api.schema import show
from dtf.config.option_files import SCHEMA, is_base, option_of
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
    an option that the command line, or another entry, chooses too.
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
        _check_words(file, entry)
        bare = isinstance(entry, str) and entry.startswith(f"{SCHEMA}/") and "@" not in entry
        if bare and group in GROUPS and name:
            raise ConfigError(
                f"{file}: {entry} in its defaults list puts the keys into {group}.{SCHEMA}; write {entry}{here}"
            )
    for _, chosen, value in choices_in(config_path, defaults):
        if name and chosen in (EXPERIMENT, f"{group}/{EXPERIMENT}"):
            raise ConfigError(f"{file}: {_no_experiment(group, value)}")
    _refuse_second_choices(file, config_path, defaults)


def _check_words(file: Path, entry: Any) -> None:
    """Raise ConfigError for the words `optional`, and `override` without a group, in an entry of a defaults list."""
    for text in entry if isinstance(entry, dict) else [entry]:
        words = str(text).split()
        if "optional" in words[:-1]:
            left = " ".join(word for word in _written(entry).split() if word != "optional")
            raise ConfigError(
                f"{file}: {_written(entry)} in its defaults list: optional passes over an option that is not there "
                f"without a word; leave it out: {left}"
            )
    if isinstance(entry, str) and entry.startswith("override "):
        raise ConfigError(
            f"{file}: {show(entry)} in its defaults list: override goes before GROUP: OPTION; write override /GROUP: "
            "NAME"
        )


def _refuse_second_choices(file: Path, config_path: str, defaults: list[Any]) -> None:
    """Raise ConfigError for an option of another group that is named as a base is, so that the choice on the command
    line would lose to it, and for two overrides of one group.
    """
    group, name = option_of(config_path)
    own, overridden = group if name else "", set[str]()
    for entry, is_override, path in _options_in(config_path, defaults):
        chosen, option = option_of(path)
        if path == ROOT and own and not is_override:
            raise ConfigError(
                f"{file}: {_written(entry)} in its defaults list leads back to the file itself, as {ROOT} is the root "
                "that chooses it; leave it out"
            )
        if is_override or chosen == own or chosen not in (*GROUPS, EXPERIMENT):
            continue
        if not own and isinstance(entry, dict) and set(entry) <= {chosen, f"/{chosen}"}:
            continue  # Hydra refuses it where the group has an option
        if chosen == EXPERIMENT and own:
            raise ConfigError(f"{file}: {_no_experiment(group, option)}")
        raise ConfigError(f"{file}: {second_choice(_written(entry), chosen, option, own)}")
    for is_override, chosen, _ in choices_in(config_path, defaults):
        if is_override and chosen in overridden:
            raise ConfigError(
                f"{file}: override /{chosen} stands twice in its defaults list, and only the first counts; leave one"
            )
        overridden |= {chosen} if is_override else set()
    for entry in (entry for entry in defaults if isinstance(entry, str) and defaults.count(entry) > 1):
        raise ConfigError(f"{file}: {entry} stands twice in its defaults list; leave one")
    for entry, _, path in _options_in(config_path, defaults):
        if {".", ".."} & {*_written(entry).split("@")[0].replace(":", "/").split("/")}:
            raise ConfigError(
                f"{file}: {_written(entry)} in its defaults list: a path has no . and no ..; write /{path}"
            )


def second_choice(written: str, group: str, option: Any, own: str = "") -> str:
    """What is wrong with an entry of a defaults list that chooses an option once more. `own`: the group of the file."""
    remedy = f"write override /{group}: {show(option)} at the end of the list"
    if own in GROUPS and own != "recipe":
        remedy = f"leave it out, and choose {group}={show(option)} in an experiment or on the command line"
    return f"{written} in its defaults list is a second choice of {group}; {remedy}"


def check_order(file: Path, config_path: str, defaults: list[Any], content: Mapping[Any, Any]) -> None:
    """Raise ConfigError for a file with keys that starts from a base after its own keys, which then count for
    nothing.
    """
    group, name = option_of(config_path)
    if "_self_" not in defaults or not set(content) - {"hydra"} or (name and group not in GROUPS):
        return
    place = defaults.index("_self_")
    before = [path for _, is_override, path in _options_in(config_path, defaults[:place]) if not is_override]
    for entry, is_override, path in _options_in(config_path, defaults[place:]):
        other, option = option_of(path)
        if is_override or (isinstance(entry, dict) and not name):
            continue
        if path == ROOT or is_base(path) or (other == group and option in registered(group)) or not before:
            raise ConfigError(
                f"{file}: {_written(entry)} comes after _self_ in its defaults list, so that none of the file's own "
                f"keys would count; _self_ goes after it: defaults: [{_written(entry)}, _self_]"
            )


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
                place = line.partition("@package")[2].strip(" :") or "_global_"
                remedy = "is read only above all other lines; move it up"
                if number == 1:
                    remedy = f"is not read so; write # @package {place}"
                raise ConfigError(f"{file}, line {number}: {line.strip()} {remedy}")
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
    for entry in defaults:
        for key, value in entry.items() if isinstance(entry, dict) else ():
            *words, group = str(key).split("@")[0].split() or [""]
            yield "override" in words, _whole(path, group), value


def named_by(path: str, reads: Mapping[str, YamlFile], overrides: bool = False) -> list[str]:
    """The paths of the options that the defaults list of a file names; with those it only overrides where asked."""
    defaults = reads[path].defaults if path in reads else []
    return [option for _, is_override, option in _options_in(path, defaults) if overrides or not is_override]


def _options_in(path: str, defaults: list[Any]) -> Iterator[tuple[Any, bool, str]]:
    """(entry, whether it is an override, path of the option) of each option in the defaults list of a file."""
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            yield entry, False, _whole(path, entry)
        for is_override, group, value in choices_in(path, [entry]):
            for name in value if isinstance(value, list) else [] if value is None else [value]:
                yield entry, is_override, _whole("", f"{group}/{name}")


def _whole(path: str, named: str) -> str:
    """The path of an option or group, as the defaults list of the file at `path` names it."""
    place = named.split("@")[0].removesuffix(".yaml")
    folder = "" if place.startswith("/") else path.rpartition("/")[0]
    return posixpath.normpath(f"/{folder}/{place}").strip("/")


def _written(entry: Any) -> str:
    """An entry of a defaults list as the file has it."""
    return ", ".join(f"{key}: {show(value)}" for key, value in entry.items()) if isinstance(entry, dict) else str(entry)


def _ways(path: str, reads: Mapping[str, YamlFile]) -> Iterator[list[str]]:
    """The paths of options on the way to each that the defaults list of `path` names, directly or by another file."""
    ways, seen = [[name] for name in named_by(path, reads)], set()
    while ways:
        way = ways.pop(0)
        yield way
        if way[-1] not in seen:
            seen.add(way[-1])
            ways += [[*way, name] for name in named_by(way[-1], reads)]
