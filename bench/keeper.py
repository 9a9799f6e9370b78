"""What a bench has started ends with it, however it ends.

All that it starts has a mark in its environment, which whatever they start inherits: neither a session of their own nor
a parent that is gone hides them.

    python bench/keeper.py PID MARK     # waits for the end of its parent PID, then ends all that have the mark
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

VARIABLE = "DTF_BENCH_STARTED_BY"
_LIMIT_S = 30.0


@cache
def keep() -> str:
    """From now on all that this process starts has the mark that is returned, and is ended with it. Marks that begin
    with it are its own, too.
    """
    mark = f"{os.getpid()}-{time.time_ns()}/"
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=null, setsid=True)  # Ctrl-C does not reach it
    os.environ[VARIABLE] = mark
    return mark


def end(mark: str) -> None:
    """Kill all that have it, until there is none: they may start others meanwhile. Those that wait for a device, and so
    cannot end, are told and left.
    """
    limit = time.monotonic() + _LIMIT_S
    while found := _marked(mark):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > limit:
            print(f"processes {', '.join(map(str, found))} do not end within {_LIMIT_S:.0f} s", file=sys.stderr)
            return
        time.sleep(0.005)


def _marked(mark: str) -> list[int]:
    """Processes that have it; of those that have ended, nothing is to be read."""
    wanted, found = f"{VARIABLE}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(each.startswith(wanted) for each in variables):
                    found.append(int(entry.name))
    return found


def main() -> None:
    parent, mark = int(sys.argv[1]), sys.argv[2]
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([handle], [], [])
    end(mark)


if __name__ == "__main__":
    main()
