"""The `name` in a node of a config, which Hydra merges as any key: that of the class whose keys and values it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dtf.api.registry import base_of, family_of, registered
from dtf.api.schema import UNSET, KeyProblem, option_node, show
from dtf.config.option_files import SCHEMA, is_base, option_of
from dtf.config.settings import EXPERIMENT, GROUPS
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dtf.config.defaults_lists import YamlFile
    from dtf.config.provenance import Source


def check_nodes(
    config: Mapping[str, Any], reads: Mapping[str, YamlFile], sources_of: Callable[[str], list[Source]]
) -> None:
    """Raise ConfigError for a file without a package line that needs one, and KeyProblem for a `name` in a file that is
    not that of the class from which its node starts.
    """
    _check_packages(config, reads)
    for key in {key: None for path, read in reads.items() for key in _named_nodes(path, read)}:
        for before, after in itertools.pairwise(sources_of(key)):
            if after.value == before.value or not after.option:
                continue
            group, name = option_of(after.option)
            if after.value == name and name in registered(group):
                continue  # another base, with all of its keys
            chosen = key.split(".")[0]
            if after.value not in registered(chosen):
                continue  # it is refused by its own name
            other = f"{SCHEMA}/{after.value}@_here_" if group == chosen else f"override /{chosen}: {after.value}"
            raise KeyProblem(
                key,
                f"{key}={show(after.value)} is another class than {show(before.value)}, from which the node starts; "
                f"leave the name out{'' if chosen == 'observer' else f', or write {other} into the defaults list'}",
            )


def _check_packages(config: Mapping[str, Any], reads: Mapping[str, YamlFile]) -> None:
    """Raise ConfigError for a file whose keys stand one node too deep, or beside the names of observers."""
    observers, recipe = config.get("observer"), config.get("recipe")
    wrong = {
        EXPERIMENT: EXPERIMENT in config,
        "recipe": isinstance(recipe, dict) and "recipe" in recipe and "name" not in recipe,
        "observer": isinstance(observers, dict) and not all(isinstance(node, dict) for node in observers.values()),
    }
    for path, read in reads.items():
        group, package = path.split("/")[0], read.header.get("package")
        if not wrong.get(group) or is_base(path) or package not in (None, "observer"):
            continue
        place, line = "beside the names of observers", path.replace("/", ".")
        if group != "observer":
            place, line = f"into a node {group} of its own", "_global_"
        raise ConfigError(f"{read.file} puts its keys {place}; begin it with the line # @package {line}")


def set_true_names(config: dict[str, Any], tree: DictConfig) -> None:
    """Give each node of a config the name of `true_name`, in place; `tree`: the same config as Hydra composed it."""
    from omegaconf import flag_override  # ranks, which import this module, have no tree

    for group in GROUPS:
        for inner, node in config[group].items() if group == "observer" else [("", config[group])]:
            name = true_name(group, node)
            if name != node["name"]:
                node["name"] = name
                with flag_override(tree, ["readonly", "struct"], False):
                    (tree[group][inner] if inner else tree[group])["name"] = name


def true_name(group: str, node: Mapping[str, Any]) -> Any:
    """The name that the values of a node tell: among an option and its variants, that of the one whose defaults they
    are; of the option where nothing is left that makes the named variant; else the name that is there.
    """
    name = node.get("name")
    if not isinstance(name, str) or name not in registered(group):
        return name
    variants, base = _variants(group, name), base_of(group, name)
    values = {key: node.get(key) for key in variants[name]}
    if UNSET in values.values():
        return name
    exact = next((member for member, defaults in variants.items() if values == defaults), None)
    own = [key for key, value in variants[name].items() if value != variants[base][key]]
    changed = all(values[key] != variants[name][key] for key in own)
    return exact or (base if changed else name)


def _variants(group: str, name: str) -> dict[str, dict[str, Any]]:
    """An option and its variants, by name -> the keys in which any two of them differ, with their defaults."""
    nodes = {member: option_node(group, member) for member in family_of(group, name)}
    plain = nodes[base_of(group, name)]
    differ = [key for key in plain if key != "name" and any(node[key] != plain[key] for node in nodes.values())]
    return {member: {key: node[key] for key in differ} for member, node in nodes.items()}


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
