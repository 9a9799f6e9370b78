"""The processes of a trial, as anybody on this host sees them: /proc, and the board of heartbeats.

Nothing in a run knows that it is watched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

from dtf.host.heartbeat import Beat, Board

_PR_SET_CHILD_SUBREAPER = 36
_FORK_SERVER = b"dtf.launch.forkserver"
_LOG = re.compile(r"/rank_(\d+)\.log$")


def adopt_orphans(adopt: bool) -> None:
    """From now on processes whose parents die become children of this one, so that none is overlooked; or no more."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children(pid: int) -> list[int]:
    """Process ids of the children of a process, of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all processes below one, nearest first."""
    found = children(pid)
    for child in found:  # grows while it is read
        found += children(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def fork_server(launcher: int) -> int:
    """The process that forks ranks for a launching process; 0: there is none yet."""
    for child in children(launcher):
        with contextlib.suppress(OSError):
            if _FORK_SERVER in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return 0


def ranks(launcher: int) -> dict[int, int]:
    """Rank -> process id, of ranks that have opened their logs."""
    found = {}
    for child in children(fork_server(launcher)) if fork_server(launcher) else ():
        with contextlib.suppress(OSError):
            if (log := _LOG.search(os.readlink(f"/proc/{child}/fd/1"))) and alive(child):
                found[int(log[1])] = child
    return found


class Beats:
    """The heartbeats of a trial's ranks, of whichever attempt is the newest."""

    def __init__(self, launcher: int) -> None:
        self._launcher, self._board, self._file = launcher, None, 0
        self._looked = 0.0

    def read(self, rank: int) -> Beat | None:
        """The last beat of a rank. None: there is no board yet, or it has no such rank."""
        self._look()
        return self._board.read(rank) if self._board is not None and rank < len(self._board) else None

    def _look(self) -> None:
        """Open the board that is there now. Where one is open, look again only now and then."""
        now = time.monotonic()
        if self._board is not None and now - self._looked < 0.02:
            return
        self._looked = now
        boards = _boards(self._launcher)
        if not boards or self._file in boards:
            return
        file, path = boards.popitem()
        with contextlib.suppress(OSError, ValueError):
            board = Board.opened(path)
            self.close()
            self._board, self._file = board, file

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        self._board = None


def _boards(launcher: int) -> dict[int, str]:
    """The boards that a launching process has open, one at a time: number of the file -> path."""
    folder, found = f"/proc/{launcher}/fd", {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if Board.NAME in os.readlink(path := f"{folder}/{name}"):
                    found[os.stat(path).st_ino] = path
    return found


def reap_orphans(kept: set[int]) -> list[int]:
    """Collect the children of this process that have ended, but `kept`; process ids of those that still run."""
    running = []
    for child in children(os.getpid()):
        if child in kept:
            continue
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child, os.WNOHANG)[0]:
                continue
        if alive(child):
            running += [child, *descendants(child)]
    return running


def kill(pids: list[int]) -> None:
    """End processes for good."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shown(pid: int) -> str:
    """A process in one line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "gone"
    return f"{pid} {command[:120]}"
