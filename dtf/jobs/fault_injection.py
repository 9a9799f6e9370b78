"""Kills a process of a run by SIGKILL, and finds out from which step the run goes on."""

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
class KillRecord:
    """A process that was killed."""

    who: str
    at: int  # steps that were reported before
    again: int  # the step from which the run was repeated; `at` where no step was


class KillTrigger:
    """Watches the events of a run, and calls `kill` once, when `after` steps were reported.

    `at`: the step after which a process was killed already; then nothing is called. -1: none was.
    """

    def __init__(self, after: int = 0, kill: Callable[[], None] = lambda: None, at: int = -1) -> None:
        self._after, self._kill, self._at = after, kill, at
        self._again = -1
        self._noticed = False

    def see(self, event: Event) -> None:
        match event:
            case Measured(split="train", step=step) if self._at < 0:
                if step >= self._after:
                    self._at = step
                    self._kill()
            case Measured(split="train", step=step) if not self._noticed:  # reported before the kill was noticed
                self._at = max(self._at, step)
            case Note(level="warning") if self._at >= 0:
                self._noticed = True
            case Started(step=step) if self._at >= 0:
                self._noticed, self._again = True, step
            case _:
                pass

    def record(self, who: str) -> KillRecord | None:
        """None when the run ended before the kill was noticed."""
        if not self._noticed:
            return None
        return KillRecord(who, self._at, self._again if self._again >= 0 else self._at)


_CHILD = (
    "import json, sys; order = json.loads(sys.argv[1]); sys.path[:] = order['path']; from dtf.launch.forkserver "
    "import die_with; die_with(order['parent']); "
    "sys.argv = ['dtf', *order['command']]; from dtf.cli.main import main; sys.exit(main())"
)


def kill_launcher(command: Sequence[str], folder: Path, after: int) -> int:
    """Run a dtf command in a process of its own, and kill the process once the run folder reports `after` steps.

    Returns the number of reported steps. DtfError when the process ended before.
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
    """The number of steps in metrics.jsonl."""
    steps = [0]
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # half a line
                steps.append(json.loads(line)["step"])
    return max(steps)
