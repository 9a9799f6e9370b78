"""Overrides that a job takes from the config of the run whose model it uses. Reads one file; composes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from dtf.api.schema import show
from dtf.checkpoint.resolve_path import is_checkpoint, resolve_checkpoints
from dtf.config.limits import read_checked
from dtf.config.node_names import true_name
from dtf.core.errors import ConfigError, DataError
from dtf.core.files import flat
from dtf.core.main_module import is_loaded
from dtf.core.renamed import upgraded_config

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.*?\[\]-]+")


def config_beside(checkpoint: Path) -> Path | None:
    """The config that lies beside the folder of checkpoints in a run folder, if it does."""
    file = checkpoint.resolve().parent.parent / "config.yaml"
    return file if file.is_file() else None


_OF_THE_RUN = ("recipe.model.weights", "sparse.disk", "sparse.memory_gb")
"""Keys that say where a run began, or where it kept rows: a job may be on another host."""


def overrides_from_run(
    model: str, keys: Collection[str], chosen: Mapping[str, str], plugins: Collection[str]
) -> list[str]:
    """Overrides with the values of `keys` (KEY or GROUP.KEY) in the config of the run that `model`, a checkpoint or a
    run folder, belongs to. They are to stand before those of the command line.

    Empty for a file of weights, and for a checkpoint outside its run folder. `chosen`: the command line, key to value.
    `plugins`: those that the command line trusts. ConfigError or DataError.
    """
    if "${" in model:
        raise ConfigError(
            f"job.model={model} holds an interpolation, and a config cannot be read from there; write the path"
        )
    path = Path(model).expanduser()
    file = config_beside(resolve_checkpoints(path, "job.model")[0]) if model and is_checkpoint(path) else None
    if file is None:
        return []
    return _overrides(saved_config(file, f"job.model={model}", plugins), keys, chosen)


def saved_config(file: Path, given: str, plugins: Collection[str]) -> dict[str, Any]:
    """The config of a run from its file, with the keys and names of today.

    DataError when it is none, ConfigError when it needs plugins that are neither among those trusted nor imported.
    """
    if not file.exists():
        raise DataError(
            f"{given} {f'holds no {file.name}' if file.parent.is_dir() else 'does not exist'}; give the folder of a run"
        )
    try:
        read_checked(file)
        saved = yaml.safe_load(file.read_text())
    except OSError as error:
        raise DataError(f"{given}: {file} cannot be read: {error.strerror}") from None
    if not isinstance(saved, dict):
        raise DataError(
            f"{file} is no config; give the checkpoint with a recipe on the command line, away from this folder"
        )
    saved = upgraded_config(saved)
    other = [name for name in saved.get("plugins") or [] if name not in plugins and not is_loaded(str(name))]
    if other:  # a folder from elsewhere must not make this process import what it names
        raise ConfigError(
            f"the run of {given} used plugins=[{','.join(map(str, other))}]; give them on the command line if you "
            "trust them"
        )
    return {
        key: value | {"name": true_name(key, value)} if isinstance(value, dict) and "name" in value else value
        for key, value in saved.items()
    }


def _overrides(saved: dict[str, Any], keys: Collection[str], chosen: Mapping[str, str]) -> list[str]:
    """The values of `keys` in a saved config, as overrides; without groups of which the command line chooses another
    option.
    """
    overrides = []
    for key in keys:
        group, _, name = key.partition(".")
        value = saved.get(group)
        if name:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None or (key in chosen and not (isinstance(value, dict) and value.get("name") == chosen[key])):
            continue
        if not isinstance(value, dict):
            overrides.append(f"{key}={_written(value)}")
            continue
        rest = dict(value)
        if "name" in rest:
            overrides.append(f"{key}={rest.pop('name')}")
        overrides += [f"{name}={_written(leaf)}" for name, leaf in _leaves(rest, key) if name not in _OF_THE_RUN]
    return overrides


def _leaves(node: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    """As `core.files.flat`, but an empty mapping, and one whose keys are no names of options, is a value."""
    return [
        pair
        for name, value in node.items()
        for pair in (flat(value, f"{key}.{name}") if isinstance(value, dict) and value else [(f"{key}.{name}", value)])
    ]


def _written(value: Any) -> str:
    """A plain value in the grammar of overrides. ConfigError for an interpolation: a saved config is resolved."""
    if isinstance(value, str):
        if "${" in value:
            raise ConfigError(f"the run's config.yaml holds {show(value)}; a saved config holds no interpolations")
        return "'" + value.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
    if isinstance(value, dict):
        if not all(isinstance(name, str) and _PLAIN_KEY.fullmatch(name) for name in value):
            raise ConfigError(
                "the run's config.yaml has keys that the command line cannot write; give the recipe on the command line"
            )
        return "{" + ",".join(f"{name}:{_written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)
