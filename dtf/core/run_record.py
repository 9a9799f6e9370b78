"""How the run in a folder has ended, for processes that take part in a run whose folder another process made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dtf.core.consistency import keys_of_all_commands
from dtf.core.errors import Exit
from dtf.core.files import flat
from dtf.core.redaction import may_be, redact


class RunEnd(NamedTuple):
    """How a launch of a run has ended."""

    id: str  # of the launch
    exit: Exit
    cause: str


def run_end(folder: Path, config: dict[str, Any]) -> RunEnd | None:
    """How the last launch of a run of this config has ended in `folder`. None where it has not, or that cannot be told.

    `config`: as of `config_facts`; secrets are not recorded, and so not compared.
    """
    try:
        record = json.loads((folder / "run.json").read_text())
        if not record["ended"]:
            return None
        own = keys_of_all_commands(yaml.safe_load((folder / "config.yaml").read_text()))
        ours, theirs = dict(flat(redact(config), "")), dict(flat(own, ""))
        same = ours.keys() == theirs.keys() and all(may_be(ours[key], theirs[key]) for key in ours)
        return RunEnd(str(record["id"]), Exit(record["exit"]), str(record["cause"])) if same else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return None
