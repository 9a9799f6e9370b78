"""A plugin for tests: an observer that kills a rank of launcher=local, once, when training has come to a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dtf.api.observer import Observer
from dtf.api.registry import option, register
from dtf.core.types import Event, Measured
from dtf.launch import forkserver_cache


@register("observer", "kill_once")
class KillOnce(Observer):
    """Send SIGKILL to the last rank."""

    step: int = option(doc="when to send it", unit="steps")

    def see(self, event: Event) -> None:
        if isinstance(event, Measured) and event.step == self.step and not hasattr(self, "done"):
            self.done = True
            server = forkserver_cache.fork_server({}).pid
            os.kill(int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[-1]), signal.SIGKILL)
