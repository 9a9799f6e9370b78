"""What the stand-ins of trackers do wrong, as the variable TRACKER_DOES says: `hang@3` at the third report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

_calls = 0


def misbehave(when: str) -> None:
    """Called at each `log`, and once at `open` and `end`: do what was asked for this call."""
    global _calls
    what, _, at = os.environ.get("TRACKER_DOES", "").partition("@")
    _calls += when == "log"
    if not what or at != (when if at in ("open", "end") else str(_calls)):
        return
    match what:
        case "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open("hangs.new", "w") as file:
                file.write(str(child.pid))
            os.replace("hangs.new", "hangs")
            threading.Event().wait()
        case "raise" | "raise_once":
            if what == "raise":
                _calls -= 1  # the next try too
            raise RuntimeError("no such host")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "sys_exit":
            sys.exit(4)
        case "slow":
            time.sleep(0.3)
        case "full":
            with open("/dev/full", "w") as file:
                file.write("x" * 100_000)
