"""Checks that Hydra does not make: of overrides, of keys that name code, and of files that hide an option of dtf."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from dtf.api.registry import registered
from dtf.api.schema import RESERVED, KeyProblem, show
from dtf.config.dotted_keys import leaves
from dtf.config.hydra_sources import CONF, Loader, refuse_root
from dtf.config.limits import BASIC, STARTED_HERE
from dtf.config.messages import meant_option
from dtf.config.settings import EXPERIMENT, GROUPS
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


_HYDRA_ELSEWHERE = {
    "hydra.sweep.dir": "use run.dir instead",
    "hydra.sweeper.params": "write the sweep as lr.peak=0.1,0.2, or the params into a file",
    "hydra.job.name": "use run.name instead",
    "hydra.job.config": "trials are called by what sets them apart",
    "hydra.job.override_dirname": "trials are called by what sets them apart",
    "hydra.job.id": "trials are called by what sets them apart",
    "hydra.job.num": "trials are called by what sets them apart",
    "hydra.runtime": "Hydra says in it what it found",
    "hydra.overrides": "Hydra says in it what was typed",
    "hydra.env": "launcher.env sets variables of ranks",
    "hydra.help": "dtf --help is about dtf",
    "hydra.hydra_help": "dtf --help is about dtf",
}
"""Keys of Hydra that only dtf, or only a file, may set: what to write instead. Those below them too."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def check_override(override: Override, loader: Loader) -> None:
    """Raise KeyProblem for an override of a single run that chooses no option, or sets what must not be set."""
    name = override.key_or_group
    group = name.partition(".")[0]
    typed = f"~{name}" if override.is_delete() else name
    if not group:
        raise ConfigError(f"{show(override.input_line)} is no override; write key=value")
    if override.is_delete() and (name == "hydra" or name.startswith(("hydra.", "hydra/"))):
        raise KeyProblem(
            typed, f"{show(override.input_line)} takes away settings of Hydra that dtf needs; leave it out"
        )
    for unused, instead in _HYDRA_ELSEWHERE.items():
        if name == unused or name.startswith(f"{unused}."):
            raise KeyProblem(typed, f"{show(override.input_line)} is not used here; {instead}")
    if name == "hydra":
        raise KeyProblem(typed, f"{show(override.input_line)} is no override; write hydra.KEY=value")
    if group == "hydra" and name.split(".")[1] not in HydraConf.__dataclass_fields__ and override.is_add():
        raise KeyProblem(typed, f"{show(override.input_line)} has no effect here; leave it out")
    if name == "hydra/launcher" and override.value() != BASIC:
        raise KeyProblem(typed, f"{show(override.input_line)} {STARTED_HERE}")
    _check_place(override, group)
    if override.is_delete() and name in GROUPS:
        raise KeyProblem(typed, f"{show(override.input_line)} {_instead_of_deletion(group, loader)}")
    chooses = loader.repository.group_exists(name) and not override.is_delete() and not override.is_sweep_override()
    if chooses and not _may_choose(override.value()):
        drop = f", or ~{group} for none" if group == EXPERIMENT else ""
        choices = meant_option(name, override.value()) + suggest("", loader.get_group_options(name))
        raise KeyProblem(typed, f"{show(override.input_line)} is no option; {choices}{drop}")
    if RESERVED in name:
        raise KeyProblem(typed, f"{name} is refused, a config names no code; register a class and choose it by name")
    _check_name(override, loader)


def _check_name(override: Override, loader: Loader) -> None:
    """Raise KeyProblem for the name in the node of an option. Other nodes of observers need one."""
    group = override.key_or_group.partition(".")[0]
    if group not in GROUPS:
        return
    value = None if override.is_sweep_override() else override.value()
    nodes = [f"observer.{name}" for name in loader.get_group_options(group)] if group == "observer" else [group]
    for key, _ in leaves(value, override.key_or_group):
        if key.removesuffix(".name") in nodes and key.endswith(".name"):
            choice = "observer=[NAME,...]" if group == "observer" else f"{group}=NAME"
            raise KeyProblem(key, f"{key} says which class the other keys belong to; choose with {choice}")


def _check_place(override: Override, group: str) -> None:
    """Raise KeyProblem for a second place of a group that has one."""
    what, name = show(override.input_line), override.key_or_group
    if override.package is not None and group in GROUPS and group != "observer":
        raise KeyProblem(
            name,
            f"{what}: a group has one place in a config of dtf; choose with {group}=NAME, and mix options in a file: "
            "defaults: [schema/NAME@_here_]",
        )
    several = name == "observer" or name not in (*GROUPS, EXPERIMENT)
    value = override.value()
    if not several and isinstance(value, list) and all(isinstance(option, str) for option in value):
        last = value[-1] if value else "NAME"
        raise KeyProblem(name, f"{what}: {name} takes one option; write {name}={last}")
    if override.is_add() and not several and isinstance(override.value(), str):
        raise KeyProblem(name, f"{what}: {name} takes one option; write {name}={override.value()} without +")


def refuse_targets(value: Any, key: str = "") -> None:
    """Raise KeyProblem for a key anywhere in a plain config that names code. `key`: where `value` stands."""
    if isinstance(value, dict):
        entries = list(value.items())
    else:
        entries = list(enumerate(value)) if isinstance(value, list) else []
    for name, entry in entries:
        inner = f"{key}.{name}" if key else str(name)
        if name == RESERVED:
            raise KeyProblem(
                inner, f"{inner} is refused, a config names no code; register a class and choose it by name"
            )
        refuse_targets(entry, inner)


def refuse_address(config: dict[str, Any]) -> None:
    """Raise KeyProblem for a run folder on storage that is reached by an address, such as s3://bucket/run."""
    folder = config["run"]["dir"]
    if _ADDRESS.match(folder):
        raise KeyProblem(
            "run.dir",
            f"run.dir={show(folder)} is an address, and runs are kept in folders; mount the storage and give a folder "
            "there, or copy the run afterwards",
        )


def refuse_shadows(composed: DictConfig, choices: dict[str, Any]) -> None:
    """Raise ConfigError for a file of the user's that has the name of dtf's root config, and for one on
    `hydra.searchpath` that has the name of an option of dtf, which Hydra finds first. In `--config-dir` it stands in
    the place of dtf's.
    """
    for source in composed.hydra.runtime.config_sources:
        if source.schema != "file" or source.provider == "main":
            continue
        refuse_root(source.path)
        if source.provider == "command-line":
            _refuse_another_class(composed, choices, source.path)
            continue
        for group, choice in choices.items():
            for name in choice if OmegaConf.is_list(choice) else [choice]:
                file = os.path.join(source.path, group, f"{name}.yaml")
                if os.path.isfile(file) and (name in registered(group) or (CONF / group / f"{name}.yaml").is_file()):
                    raise ConfigError(f"{group}={name} is an option of dtf and also a file, {file}; rename the file")


def _refuse_another_class(composed: DictConfig, choices: dict[str, Any], folder: str) -> None:
    """Raise ConfigError for a file of the user's with the name of a class that holds the keys of another one."""
    nodes = [(group, name, node_at(composed, group)) for group, name in choices.items() if group != "observer"]
    observers = node_at(composed, "observer")
    if isinstance(observers, DictConfig):
        nodes += [("observer", name, node_at(observers, str(name))) for name in observers]
    for group, name, node in nodes:
        file = os.path.join(folder, group, f"{name}.yaml")
        if name not in registered(group) or not OmegaConf.is_dict(node) or not os.path.isfile(file):
            continue
        if node.get("name") != name:
            raise ConfigError(
                f"{group}={name} is an option of dtf, and {file} makes {show(node.get('name'))} of it; rename the "
                f"file, or begin it with defaults: [schema/{name}@_here_, _self_]"
            )


def node_at(config: DictConfig, key: str) -> Any:
    """What stands at a key; None for an interpolation, which may lead nowhere."""
    return None if key not in list(config) or OmegaConf.is_interpolation(config, key) else config.get(key)


def _may_choose(value: Any) -> bool:
    """Whether Hydra can read the value of a group as the name of an option, or of several."""
    return isinstance(value, str | dict) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _instead_of_deletion(group: str, loader: Loader) -> str:
    if group == "observer":
        return (
            "takes no observer away; write observer=[NAME,...], observer=[] for none, or ~observer.NAME; "
            f"{suggest('', loader.get_group_options(group))}"
        )
    return f"leaves no {group}; choose with {group}=NAME"
