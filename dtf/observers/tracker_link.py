"""The process of a tracker, as the launching process sees it: a queue that never makes its owner wait."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dtf.core.files import open_private

MOST_REPORTS = 50_000
"""Reports that may wait for a tracker, of some hundred bytes each. What is sent while so many wait is lost."""
_MOST_NOTES = 1000  # and other messages
_REAPED_S = 5.0
_START = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from dtf.observers.tracker_process import main\n"
    "main(sys.argv[2])\n"
)


class TrackerLink:
    """Starts the process of the tracker `name`; its output goes to `<name>.log` in the run folder. `warn` hears, from
    another thread, what people should know. No method but `close` waits for the process.
    """

    def __init__(self, name: str, folder: Path, order: dict[str, Any], warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._sent, self._taken, self._dropped = 0, 0, 0  # reports
        self._failed, self._done = "", False
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        path = [os.path.abspath(part) for part in sys.path]
        with _log(folder / f"{name}.log") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(path), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which ends the tracker; what it starts ends with it
            )
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{work.__name__}", daemon=True)
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()
        self.send(order)

    @property
    def failure(self) -> str:
        """Why the process has ended before it was told to; empty while it works."""
        return "" if self._threads[1].is_alive() or self._done else self._failed

    @property
    def lost(self) -> int:
        """Reports of which the tracker has not said that it took them."""
        return self._dropped + self._sent - self._taken

    def send(self, message: dict[str, Any], reports: int = 0) -> None:
        """Send a message, which holds so many reports, when the process reads again. Dropped where too many wait."""
        waiting = self._sent - self._taken
        if waiting >= MOST_REPORTS if reports else self._inbox.qsize() > _MOST_NOTES:
            self._dropped += reports
            return
        self._sent += reports
        self._inbox.put(message)

    def close(self, end: dict[str, Any], timeout_s: float) -> str:
        """Send the last message and wait for the process, which is killed when the time is over, with all that it has
        started. Returns why it may not have taken all; empty when it has.
        """
        self._inbox.put(end)
        self._inbox.put(None)
        reader = self._threads[1]
        reader.join(timeout_s)
        late = reader.is_alive()
        self._kill()
        reader.join(_REAPED_S)
        if late:
            return f"it was not done within {timeout_s:g} s"
        return self.failure or ("it was too slow, and too many waited" if self.lost else "")

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError), pipe:  # it has ended: `_read` hears of that too
            while (message := self._inbox.get()) is not None:
                pipe.write(json.dumps(message, default=str).encode() + b"\n")
                pipe.flush()

    def _read(self) -> None:
        """Hear what the process says, to its end."""
        pipe = self._process.stdout
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError), pipe:
            for line in pipe:
                said = json.loads(line)
                self._taken += said.get("taken", 0)
                self._done = self._done or said.get("done", False)
                if text := said.get("say"):
                    self._warn(text)
        self._kill()  # what it leaves behind; its number is its own until it is waited for
        code = self._process.wait()
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        self._failed = f"its process was {how}" if code < 0 else f"its process {how}, {self._name}.log may say why"

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _log(path: Path):
    try:
        file: IO[Any] | int = open_private(path, "ab")
    except OSError:  # a full disk: the tracker does without
        yield subprocess.DEVNULL
        return
    with file:
        yield file
