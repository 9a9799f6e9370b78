"""A dtf command in a process of its own, watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dtf.jobs.chaos.processes import Beats, adopt_orphans, alive, kill, reap_orphans, shown
from dtf.jobs.chaos.timeline import BEFORE, Timeline

OUTLIVE_S = 1.0
"""No process of a run outlives its launching process by more."""
_POLL_S = 0.001
_CHILD = """
import json, os, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
from dtf.launch.forkserver import die_with
die_with(order["parent"])
if order["switch"] >= 0:
    from dtf.jobs.chaos.network import enter_namespace, serve_switch
    enter_namespace()
    serve_switch(order["switch"])
os.execve(sys.executable, [sys.executable, *order["command"]], order["environment"])
"""


class Command:
    """A dtf command that runs. Its output goes into a file. It ends with this process.

    `network`: it gets a network of its own, which `switch` cuts (`0`) and joins (`1`). `check`: called
    while this process waits; what it raises ends the wait. `program`: arguments of Python.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        environment: dict[str, str],
        network: bool = False,
        check: Callable[[], None] = lambda: None,
        program: Sequence[str] = ("-m", "dtf"),
    ) -> None:
        adopt_orphans(True)
        self.log, self._check = log, check
        self._before = set(reap_orphans(set()))
        reading, self.switch = os.pipe() if network else (-1, -1)
        order = {
            "path": [os.path.abspath(part) for part in sys.path],
            "parent": os.getpid(),
            "switch": reading,
            "command": [*program, *words],
            "environment": {**os.environ, **environment},
        }
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[reading] if network else [],
                start_new_session=True,  # Ctrl-C in the terminal is for this process
            )
        if network:
            os.close(reading)
        self.pid = self._process.pid
        self.beats = Beats(self.pid)

    def watch(
        self, until: Callable[[], bool], timeout_s: float, timeline: Timeline | None = None, ranks: int = 0
    ) -> bool:
        """Wait until the command has ended, or `until` says so. False when the time ran out.

        `timeline`: gets what the first `ranks` ranks do.
        """
        end = time.monotonic() + timeout_s
        while self._process.poll() is None and not until():
            self._check()
            now = time.monotonic()
            if now > end:
                return False
            if timeline is not None:
                for rank in range(ranks):
                    beat = self.beats.read(rank)
                    timeline.add(rank, beat.phase if beat else BEFORE, beat.step if beat else 0, now)
            time.sleep(_POLL_S)
        return True

    @property
    def code(self) -> int | None:
        """Its exit status, -N when signal N ended it; None while it runs."""
        return self._process.poll()

    def left_behind(self) -> tuple[float, list[str]]:
        """After its end: how long others of its processes lived on, and those that still do after a few seconds. Those
        are killed.

        Time in which this process itself waited for a processor, as those may have, does not count.
        """
        self._close_switch()
        before, lived_s, kept = time.monotonic(), 0.0, self._before | {os.getpid()}
        while (running := reap_orphans(kept)) and lived_s < 5 * OUTLIVE_S:
            time.sleep(_POLL_S)
            now = time.monotonic()
            lived_s, before = lived_s + min(now - before, 2 * _POLL_S), now
        lines = [shown(pid) for pid in running]
        kill(running)
        while any(alive(pid) for pid in running):
            time.sleep(_POLL_S)
        reap_orphans(kept)
        return lived_s, lines

    def end(self) -> None:
        """Kill it and all its processes, if there are any left."""
        self._close_switch()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.beats.close()
        adopt_orphans(False)

    def _close_switch(self) -> None:
        if self.switch >= 0:
            os.close(self.switch)
        self.switch = -1
