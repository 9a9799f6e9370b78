"""The folder in which trials add up: made, or gone on with, by one command at a time and for one config."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtf.core.consistency import config_facts, differences
from dtf.core.errors import BusyError, ConfigError
from dtf.core.files import replace_text
from dtf.core.run_record import LOCK
from dtf.runs.run_folder import take_lock

TRIALS, REFERENCES, _CONFIG = "trials.jsonl", "references", "config.json"
_BEFORE = {LOCK, f".{_CONFIG}.new"}  # what a command killed in its first millisecond leaves behind


@contextmanager
def trials_folder(
    folder: Path, config: dict[str, Any], lengths: dict[str, Any], own: Collection[str] = ()
) -> Iterator[None]:
    """A context in which this process alone works in `folder`, and what it writes is its user's alone.

    `lengths`: options of the job that trials have in common. `own`: keys that the job sets itself, whatever `config`
    has. ConfigError for a folder that holds something else.
    BusyError where another process works in it, or where it holds trials of another config, which would stand in one
    table with these.
    """
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not (folder / _CONFIG).exists() and any(path.name not in _BEFORE for path in folder.iterdir()):
            raise ConfigError(f"run.dir={folder} is not empty, and holds no trials; choose another folder")
        with os.fdopen(take_lock(folder)):
            _keep_config(folder, _facts(config, lengths, own))
            yield
    finally:
        os.umask(before)


def _facts(config: dict[str, Any], lengths: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    left_out = {"job", "strategy", "run", *own}
    shared = {
        name: {key: value for key, value in node.items() if f"{name}.{key}" not in left_out}
        if isinstance(node, dict)
        else node
        for name, node in config.items()
        if name not in left_out
    }
    return json.loads(json.dumps(config_facts(shared) | {"job": lengths}, default=str))


def _keep_config(folder: Path, facts: dict[str, Any]) -> None:
    """Write the config down, or compare it with that of the trials there. Without a trial there is nothing to mix."""
    path, trials = folder / _CONFIG, folder / TRIALS
    known = read_json(path)
    if known == facts:
        return
    if trials.exists() and trials.stat().st_size:
        how = "; ".join(differences(known, facts, "that of the trials there")) or "it cannot be read"
        raise BusyError(
            f"run.dir={folder} holds trials of another config, whose numbers would mix with these: {how}; use the "
            "same options, or another run.dir"
        )
    shutil.rmtree(folder / REFERENCES, ignore_errors=True)
    replace_text(path, json.dumps(facts))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
