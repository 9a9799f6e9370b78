"""What the driver of a job on Ray and the commands that ask for it tell each other, by files of the job's folder: no
connection is needed. It travels with the driver, so it imports the standard library alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

STATE_FILE = "ray-state.json"
"""What the driver last knew. Written whole, by the driver alone; touched at each beat of its heart."""
CANCEL_FILE = "cancel"
"""The id of the job that is to end."""
_MOST = 1 << 26
"""Characters of a state: each trial adds some hundred."""
BEAT_S, SILENT_S = 5.0, 60.0
"""Seconds between two beats, and after which a silent driver is not known to live."""


def _at_once(path: str, flags: int) -> int:
    """Open what may be a pipe, and wait for nobody."""
    return os.open(path, flags | os.O_NONBLOCK)


def last_state(folder: Path, id: str) -> tuple[dict[str, Any] | None, float]:
    """What the driver of the job `id` wrote last, None where it has not, and how many seconds ago its heart beat."""
    path = folder / STATE_FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(path, opener=_at_once) as file:  # opened first: NFS looks anew
            known = os.fstat(file.fileno())
            state = json.loads(file.read(_MOST)) if S_ISREG(known.st_mode) else {"id": None}
        if state["id"] == id:
            return state, time.time() - known.st_mtime
    return None, math.inf


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the state whole. A full disk ends no run."""
    with suppress(OSError):
        new = folder / f".{STATE_FILE}.new"
        new.write_text(json.dumps(state, indent=2) + "\n")
        os.replace(new, folder / STATE_FILE)


def beat(folder: Path) -> None:
    """Say that the driver lives."""
    with suppress(OSError):
        os.utime(folder / STATE_FILE)


def is_cancelled(folder: Path, id: str) -> bool:
    with suppress(OSError):
        return (folder / CANCEL_FILE).read_text() == id
    return False
