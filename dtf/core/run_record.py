"""What a run folder says of its run to processes that have not made it: whether it lives, and how it has ended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dtf.core.consistency import keys_of_all_commands
from dtf.core.errors import Exit
from dtf.core.files import flat, small_json
from dtf.core.redaction import may_be, redact

LOCK = ".lock"
"""The file of a run folder that the launching process locks while the run lives."""


_MOST_BYTES = 1 << 26
"""Of a run.json: each launch adds some thousand."""


class RunEnd(NamedTuple):
    """How a launch of a run has ended."""

    id: str  # of the launch
    exit: Exit
    cause: str


def record_of(folder: Path) -> dict[str, Any]:
    """The run.json of a folder. OSError or ValueError where it cannot be read."""
    return small_json(folder / "run.json", _MOST_BYTES)


def run_end(folder: Path, config: dict[str, Any]) -> RunEnd | None:
    """How the last launch of a run of this config has ended in `folder`. None where it has not, or that cannot be told.

    `config`: as of `config_facts`; secrets are not recorded, and so not compared.
    """
    try:
        record = record_of(folder)
        if not record["ended"]:
            return None
        own = keys_of_all_commands(yaml.safe_load((folder / "config.yaml").read_text()))
        ours, theirs = dict(flat(redact(config), "")), dict(flat(own, ""))
        same = ours.keys() == theirs.keys() and all(may_be(ours[key], theirs[key]) for key in ours)
        return RunEnd(str(record["id"]), Exit(record["exit"]), str(record["cause"])) if same else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return None


def launches(folder: Path) -> set[str]:
    """The ids of all launches of the run in a folder, as far as they can be told."""
    try:
        record = record_of(folder)
        return {str(launch["id"]) for launch in (record, *record.get("earlier", []))}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


SUBMISSION = "DTF_SUBMISSION"
"""The environment variable with the digest of the bundle that this process runs."""
SUBMITTED_FOLDER = "DTF_SUBMITTED_FOLDER"
"""That with the run folder of the submission, where a scheduler started this process."""


def ends_of_submission(folder: Path, digest: str) -> list[int | None]:
    """How the launches of a bundle ended in a folder, the newest first; None for one that has not. Each wrote that it
    is of this bundle while it held the folder's lock. Empty where that cannot be told.
    """
    try:
        record = record_of(folder)
        launches = [record, *reversed(record.get("earlier", []))]
        return [launch["exit"] for launch in launches if launch.get("submission") == digest]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


SAVE_TIMES = 3
"""How many times the longest save so far a save is given: one that is being written comes first, and disks vary."""
LONGEST_SAVE = "longest_save_s"
"""The key of a launch in run.json for the seconds of its longest save, until that was complete."""


def longest_save_s(folder: Path) -> float | None:
    """Seconds that the longest save of a run has taken so far, in any launch. None where that cannot be told."""
    try:
        record = record_of(folder)
        known = [launch.get(LONGEST_SAVE) for launch in (record, *record.get("earlier", []))]
        return max((float(seconds) for seconds in known if seconds is not None), default=None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def time_to_save_s(folder: Path, least_s: float) -> float:
    """Seconds that the run in a folder is to be given for a save, by those that it has made; at least `least_s`."""
    return max(least_s, SAVE_TIMES * (longest_save_s(folder) or 0.0))


def is_live(folder: Path, id: str) -> bool:
    """Whether the launch `id` is known to live in a folder. False where that cannot be told."""
    try:
        return record_of(folder)["id"] == id and is_locked(folder)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def is_locked(folder: Path) -> bool:
    """Whether the process of a run, or of a sweep, is known to hold a folder. False where that cannot be told."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile would keep it
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False
