"""Killing a run in the middle, as a machine might, and seeing from where it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtf.core.errors import DtfError
from dtf.core.types import Event, Measured, Note, Started


@dataclass
class Killed:
    """Who was, after how many reported steps, and from which step on the run was done again: `at`, where nothing
    was.
    """

    who: str
    at: int
    again: int


class Witness:
    """Hears the events of a run.

    Calls `kill` once, when `after` steps were reported; with `at` somebody was killed already, after that step.
    """

    def __init__(self, after: int = 0, kill: Callable[[], None] = lambda: None, at: int = -1) -> None:
        self._after, self._kill, self._at = after, kill, at
        self._again = -1
        self._missed = False

    def see(self, event: Event) -> None:
        match event:
            case Measured(split="train", step=step) if self._at < 0:
                if step >= self._after:
                    self._at = step
                    self._kill()
            case Measured(split="train", step=step) if not self._missed:  # reported before it was noticed
                self._at = max(self._at, step)
            case Note(level="warning") if self._at >= 0:
                self._missed = True
            case Started(step=step) if self._at >= 0:
                self._missed, self._again = True, step
            case _:
                pass

    def killed(self, who: str) -> Killed | None:
        """None when the run was over before it was noticed."""
        if not self._missed:
            return None
        return Killed(who, self._at, self._again if self._again >= 0 else self._at)


_CHILD = (
    "import json, sys; order = json.loads(sys.argv[1]); sys.path[:] = order['path']; from dtf.launch.forkserver "
    "import die_with; die_with(order['parent']); "
    "sys.argv = ['dtf', *order['command']]; from dtf.cli.main import main; sys.exit(main())"
)


def kill_launcher(command: Sequence[str], folder: Path, after: int) -> int:
    """Run a dtf command in a process of its own, and kill that when `after` steps were reported in the run folder;
    returns how many were.

    DtfError when it ended before.
    """
    log = folder.with_name("launcher.log")
    order = json.dumps(
        {"path": [os.path.abspath(part) for part in sys.path], "parent": os.getpid(), "command": list(command)}
    )
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, order], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        try:
            while child.poll() is None and _reported(folder) < after:
                time.sleep(0.01)
        finally:
            child.kill()
            child.wait()
    if child.returncode != -signal.SIGKILL:
        raise DtfError(f"the launching process ended by itself with exit code {child.returncode}; {log} says why")
    log.unlink()
    return _reported(folder)


def _reported(folder: Path) -> int:
    """Steps that metrics.jsonl tells of."""
    steps = [0]
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # half a line
                steps.append(json.loads(line)["step"])
    return max(steps)
