"""sweep.json in the folder of a sweep: whether it has ended, and which trials are pruned. All else is in the trials'
folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtf.core.errors import DataError, Exit, code_name
from dtf.core.files import replace_text, small_json
from dtf.core.run_record import is_locked

FILE = "sweep.json"


class SweepRecord:
    """The record of a sweep that runs. `options`: the config node `sweep`."""

    def __init__(self, home: Path, options: Mapping[str, Any]) -> None:
        self._path = home / FILE
        self._record: dict[str, Any] = {"started": _now(), "ended": None, "exit": None, "options": dict(options)}
        self._record["pruned"] = pruned(home)
        self._write()

    @property
    def pruned(self) -> dict[str, int]:
        """Name of a trial's folder -> the step at which it stopped for good."""
        return self._record["pruned"]

    def prune(self, stopped: Mapping[str, int]) -> None:
        """These trials have stopped for good, and no others."""
        if self.pruned != stopped:
            self._record["pruned"] = dict(stopped)
            self._write()

    def end(self, code: int) -> None:
        self._record |= {"ended": _now(), "exit": int(code)}
        self._write()

    def _write(self) -> None:
        replace_text(self._path, json.dumps(self._record, indent=2) + "\n")


def is_sweep(home: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (home / FILE).is_file()


def sweep_state(home: Path) -> str:
    """How a sweep stands, in a few words. DataError for a file that no sweep writes."""
    if is_locked(home):
        return "running"
    try:
        exit = small_json(home / FILE)["exit"]
        if exit is None:
            return "handed over or killed, or its host is not this one"
        return f"ended with {code_name(Exit(exit)) if exit in set(Exit) else f'exit code {exit}'}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{home / FILE} cannot be read ({type(error).__name__}: {error}); remove it") from error


def pruned(home: Path) -> dict[str, int]:
    """Name of a trial's folder -> the step at which it stopped for good. DataError for a file that no sweep writes."""
    try:
        return {str(name): int(step) for name, step in small_json(home / FILE)["pruned"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{home / FILE} cannot be read ({type(error).__name__}: {error}); remove it") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
