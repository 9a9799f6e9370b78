"""Ranks on this host, forked from a process that has torch imported, watched and restarted by this one, which never
imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtf.api.launcher import WORK
from dtf.api.registry import register
from dtf.core.types import Event
from dtf.host import network
from dtf.launch.supervised import SupervisedLauncher

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun


@register("launcher", "local")
class Local(SupervisedLauncher):
    """Start ranks on this host, watch them, restart them from the last checkpoint when one is lost."""

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        sockets = (
            network.socket_variables(self.interface, ("127.0.0.1", 1), os.environ)
            if self.interface
            else network.loopback_variables(os.environ)
        )
        return self.supervise(run, see, entry, sockets)
