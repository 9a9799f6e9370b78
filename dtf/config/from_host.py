"""Values of a config that a strategy derives from this host, see `Strategy.from_host`. Reads one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtf.api.registry import lookup
from dtf.api.schema import build_option, unset
from dtf.api.strategy import Strategy
from dtf.checkpoint.resolve_path import run_folder_of
from dtf.config.limits import read_checked
from dtf.core.errors import ConfigError


def fill_from_host(config: dict[str, Any], is_set: Callable[[str], bool]) -> None:
    """Put what follows from this host into `config`, in place. `is_set`: whether a file or the command line sets a
    key. A run that goes on keeps what was chosen at its start, on whatever host that was.
    """
    node = config["strategy"]
    if lookup("strategy", node["name"]).from_host is Strategy.from_host or unset(node):  # type: ignore[attr-defined]
        return
    derived = build_option("strategy", node).from_host(config["launcher"], is_set)
    if not derived:
        return
    before = _earlier(config)
    decides = node.keys() - {key.partition(".")[2] for key in derived if key.startswith("strategy.")}
    goes_on = all(before.get("strategy", {}).get(key) == node[key] for key in decides)
    for key, value in derived.items():
        group, name = key.split(".")
        chosen = config[group][name] == "auto" or not is_set(key)
        kept = before.get(group, {}).get(name) if goes_on and chosen else None
        config[group][name] = kept if isinstance(kept, int) else value


def _earlier(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the run that this one goes on with; empty where there is none."""
    import yaml

    resume, folder = config["checkpoint"].get("resume", "never"), config["run"]["dir"]
    for run in (Path(folder) if folder and resume != "never" else None, run_folder_of(resume)):
        try:
            found = yaml.safe_load(read_checked(run / "config.yaml")) if run is not None else None
        except (OSError, ConfigError):  # no such run, or one that says nothing
            continue
        if isinstance(found, dict) and all(
            isinstance(found.get(group, {}), dict) for group in ("strategy", "launcher")
        ):
            return found
    return {}
