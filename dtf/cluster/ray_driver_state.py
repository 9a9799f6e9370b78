"""What the driver of a job on Ray and the commands that ask for it tell each other, by files of the job's folder: no
connection is needed. It travels with the driver, so it imports the standard library alone.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
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


def last_state(folder: Path, id: str) -> dict[str, Any] | None:
    """What the driver of the job `id` wrote last; None where it has not."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        with open(folder / STATE_FILE, opener=_at_once) as file:
            state = json.loads(file.read(_MOST)) if S_ISREG(os.fstat(file.fileno()).st_mode) else {"id": None}
        return state if state["id"] == id else None
    return None


def age_s(path: Path) -> float:
    """Seconds since a file was written or touched; infinite where there is none. By the clock of its storage where that
    can be asked, as by a file on NFS: clocks of hosts differ.
    """
    try:
        os.close(_at_once(str(path), os.O_RDONLY))  # NFS looks anew
        touched = path.stat().st_mtime
        with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime - touched
        return time.time() - touched
    except OSError:
        return math.inf


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
