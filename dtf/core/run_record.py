"""Whether the run in a folder has finished, for processes that take part in a run whose folder another process made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dtf.core.consistency import keys_of_all_commands
from dtf.core.errors import Exit
from dtf.core.redaction import redact


def finished(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a run of this config has come to its end in `folder`. False where that cannot be told.

    `config`: as of `config_facts`; secrets are not recorded, and so not compared.
    """
    try:
        record = json.loads((folder / "run.json").read_text())
        if not record["ended"] or record["exit"] != Exit.OK:
            return False
        own = keys_of_all_commands(yaml.safe_load((folder / "config.yaml").read_text()))
        return json.dumps(own, sort_keys=True) == json.dumps(redact(config), sort_keys=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return False
