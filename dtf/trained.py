"""A finished run as what another job starts from: its config, its newest checkpoint, ranks to work on it. Torch-free; trains nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from dtf.checkpoint import located
from dtf.config import Composed
from dtf.errors import ConfigError, DataError, DtfError, Exit
from dtf.run import Run, flat
from dtf.schema import show
from dtf.untrusted import scan
from dtf.values import Event, Failed, Measured, Note

TAKEN = ("seed", "recipe", "precision", "step")
"""What a run's config says of its model and data; how to spread the work is this command's own business."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.*?\[\]-]+")


def config_of(checkpoint: Path) -> Path | None:
    """The config that lies beside the folder of checkpoints in a run folder, if it does."""
    file = checkpoint.resolve().parent.parent / "config.yaml"
    return file if file.is_file() else None


def continued(composed: Composed, model: str) -> Composed:
    """The composed config over that of the run which `model`, a checkpoint or a run folder, belongs to; the command line wins.

    A file of weights, and a checkpoint away from its run folder, leave it as it is. ConfigError when there is no model at all.
    """
    if not model:
        if not composed.settings.recipe.fine_tuning.weights:
            raise ConfigError("job.model is not set; give a run folder, a checkpoint or a file of weights: job.model=PATH")
        return composed
    path = Path(model).expanduser()
    if not path.exists():
        raise DataError(f"job.model={model} does not exist; give a run folder, a checkpoint or a file of weights")
    file = config_of(located(path, "job.model")[0]) if path.is_dir() else None
    if file is None:
        return composed
    scan(file)
    saved = yaml.safe_load(file.read_text())
    if not isinstance(saved, dict):
        raise DataError(f"{file} is no config; give the checkpoint with a recipe on the command line, away from this folder")
    chosen = {key: value for key, _, value in (text.lstrip("+~").partition("=") for text in composed.overrides)}
    other = [name for name in saved.get("plugins") or [] if name not in composed.config["plugins"]]
    if other:  # a folder from elsewhere must not make this process import what it names
        raise ConfigError(f"the run of job.model={model} used plugins=[{','.join(map(str, other))}]; give them on the command line if you trust them")
    return composed.composer.compose([*_overrides(saved, chosen), *composed.overrides])


def _overrides(saved: dict[str, Any], chosen: dict[str, str]) -> list[str]:
    """What a saved config says of the keys in TAKEN, as overrides, but for groups that the command line chooses otherwise."""
    found = []
    for key in TAKEN:
        value = saved.get(key)
        if value is None or (key in chosen and not (isinstance(value, dict) and value.get("name") == chosen[key])):
            continue
        if not isinstance(value, dict):
            found.append(f"{key}={_written(value)}")
            continue
        rest = dict(value)
        if "name" in rest:
            found.append(f"{key}={rest.pop('name')}")
        found += [f"{name}={_written(leaf)}" for name, leaf in _leaves(rest, key) if name != "recipe.model.weights"]
    return found


def _leaves(node: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    """As `run.flat`, but that an empty mapping, and one whose keys are no names of options, is a value."""
    return [
        pair for name, value in node.items() for pair in (flat(value, f"{key}.{name}") if isinstance(value, dict) and value else [(f"{key}.{name}", value)])
    ]


def _written(value: Any) -> str:
    """A plain value in the grammar of overrides. ConfigError for an interpolation: a saved config is resolved."""
    if isinstance(value, str):
        if "${" in value:
            raise ConfigError(f"the run's config.yaml holds {show(value)}; a saved config holds no interpolations")
        return "'" + value.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
    if isinstance(value, dict):
        if not all(isinstance(name, str) and _PLAIN_KEY.fullmatch(name) for name in value):
            raise ConfigError("the run's config.yaml has keys that the command line cannot write; give the recipe on the command line")
        return "{" + ",".join(f"{name}:{_written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def launch(composed: Composed, data: bool = True, alone: bool = False) -> Path | None:
    """Start ranks for the config's job in a run folder; returns it once they have ended well, else raises `Ended`.

    None in a process that another one reports for.

    `data`: whether the recipe's own data are needed; `alone`: one rank is to do it.
    """
    if alone:
        if composed.config["launcher"].get("processes", 1) not in ("auto", 1):
            raise ConfigError(f"job={composed.config['job']['name']} is the work of one process; use launcher.processes=1")
        composed = composed.recompose(["launcher.processes=1"]) if "processes" in composed.config["launcher"] else composed
    settings = composed.check(data)
    launcher = settings.launcher
    launcher.check(settings.strategy)
    processes, devices = launcher.count(), launcher.devices_kind()
    run = launcher.open(composed.config, lambda folder: Run.open(composed.config, settings, processes, devices, folder), composed.command)
    exit, cause = Exit.BUG, "an exception in the launching process"

    def see(event: Event) -> None:
        nonlocal cause
        match event:
            case Failed():
                cause = event.message
            case Note(level, text):
                print(f"dtf: {level}: {text}", file=sys.stderr, flush=True)
            case Measured("rows", done, _, _, values):
                print(f"dtf: {done:,} of {values['rows']:,.0f} rows, {values['rows_per_s']:,.0f} rows/s", file=sys.stderr, flush=True)

    try:
        exit = Exit(launcher.launch(run, see))
        cause = cause if exit else "finished"
    except DtfError as error:
        exit, cause = error.exit, str(error)
        raise
    finally:
        run.end(exit, cause)
    if exit:
        raise Ended(exit)
    return run.folder if run.leader else None


class Ended(Exception):
    """The ranks ended with an exit code other than 0; the launcher has printed why."""

    def __init__(self, exit: Exit) -> None:
        super().__init__(exit)
        self.exit = exit
