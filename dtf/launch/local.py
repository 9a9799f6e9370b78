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
from dtf.launch.restart_policy import supervise
from dtf.launch.supervised import Watched
from dtf.launch.worker_group import Attempt

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun


@register("launcher", "local")
class Local(Watched):
    """Start ranks on this host, watch them, restart them from the last checkpoint when one is lost."""

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        with Stop() as stop:

            def attempt(number: int) -> Attempt:
                alone = run.strategy.external_process()
                towards = alone.towards if alone else ("127.0.0.1", 1)
                inside = network.loopback_variables(os.environ) if not (alone or self.interface) else None
                sockets = inside or network.socket_variables(self.interface, towards, os.environ)
                return self.attempt(run, entry, number, sockets, stop, see)

            outcome = supervise(attempt, self.max_restarts, lambda: stop.count > 0, see)
        if outcome.cause:
            see(outcome.cause)
            report(outcome.cause)
        return outcome.exit
