"""sweep.json in the folder of a sweep: whether it has ended, what it aims at, which trials are pruned, and which have
finished where their folders are not seen from here. All else is in the trials' folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from dtf.core.errors import DataError, Exit, code_name
from dtf.core.files import replace_text, small_json
from dtf.core.run_record import is_locked

_Value = TypeVar("_Value")
FILE = "sweep.json"
_MOST_BYTES = 1 << 26  # a line for each trial that has finished


class SweepRecord:
    """The record of a sweep that runs. `options`: the config node `sweep`; `objective`: its metric, and max or min."""

    def __init__(self, home: Path, options: Mapping[str, Any], objective: tuple[str, str] = ("", "max")) -> None:
        self._path = home / FILE
        self._record: dict[str, Any] = {"started": _now(), "ended": None, "exit": None, "options": dict(options)}
        self._record |= {"objective": list(objective), "pruned": pruned(home), "finished": finished(home)}
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

    def finish(self, trials: Mapping[str, str]) -> None:
        """These have finished as well. Name of a trial -> digest of its config and place."""
        self._record["finished"] |= trials
        self._write()

    def end(self, code: int) -> None:
        self._record |= {"ended": _now(), "exit": int(code)}
        self._write()

    def _write(self) -> None:
        replace_text(self._path, json.dumps(self._record, indent=2) + "\n")


def is_sweep(home: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (home / FILE).is_file()


def sweep_state(home: Path, submitted: bool = False) -> str:
    """How a sweep stands, in a few words. `submitted`: a job of a scheduler has its trials. DataError for a file that
    no sweep writes.
    """
    if is_locked(home):
        return "running"
    try:
        exit = small_json(home / FILE, _MOST_BYTES)["exit"]
        if exit is None:
            return "handed over to its job" if submitted else "killed, or its host is not this one"
        return f"ended with {code_name(Exit(exit)) if exit in set(Exit) else f'exit code {exit}'}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{home / FILE} cannot be read ({type(error).__name__}: {error}); remove it") from error


def pruned(home: Path) -> dict[str, int]:
    """Name of a trial's folder -> the step at which it stopped for good. DataError for a file that no sweep writes."""
    return _read(home, lambda kept: {str(name): int(step) for name, step in kept["pruned"].items()}, {})


def finished(home: Path) -> dict[str, str]:
    """Name of a trial -> digest of its config and place, of those whose scheduler said that they have finished.
    DataError as of `pruned`.
    """
    return _read(home, lambda kept: {str(name): str(text) for name, text in kept.get("finished", {}).items()}, {})


def objective(home: Path) -> tuple[str, str] | None:
    """The metric that a sweep aims at, and `max` or `min`; None for that of an earlier version. DataError as of
    `pruned`.
    """
    name, direction = _read(home, lambda kept: map(str, kept.get("objective", ("", ""))), ("", ""))
    return (name, direction) if name else None


def _read(home: Path, value: Callable[[Any], _Value], none: _Value) -> _Value:
    try:
        return value(small_json(home / FILE, _MOST_BYTES))
    except FileNotFoundError:
        return none
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{home / FILE} cannot be read ({type(error).__name__}: {error}); remove it") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
