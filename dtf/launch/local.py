"""Ranks on this host, forked from a process that has torch imported, watched and restarted by this one, which never
imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtf.api.launcher import WORK, report
from dtf.api.registry import register
from dtf.core.types import Event
from dtf.host import network
from dtf.host.signals import Stop
from dtf.launch.restart_policy import run_with_restarts
from dtf.launch.supervised import SupervisedLauncher
from dtf.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun


@register("launcher", "local")
class Local(SupervisedLauncher):
    """Start ranks on this host, watch them, restart them from the last checkpoint when one is lost."""

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        with Stop() as stop:

            def start(attempt: int) -> WorkerGroup:
                external = run.strategy.external_process()
                towards = external.towards if external else ("127.0.0.1", 1)
                loopback = network.loopback_variables(os.environ) if not (external or self.interface) else None
                sockets = loopback or network.socket_variables(self.interface, towards, os.environ)
                return self.worker_group(run, entry, attempt, sockets, stop, see)

            result = run_with_restarts(start, self.max_restarts, lambda: stop.count > 0, see)
        if result.cause:
            see(result.cause)
            report(result.cause)
        return result.exit
