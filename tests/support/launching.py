"""Start the entries of tests/support/entries.py with launcher=local, as a run would."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dtf.api.schema import build_option, coerce_option
from dtf.api.strategy import Strategy
from dtf.config.settings import Settings
from dtf.core.types import Event
from dtf.launch.local import Local
from dtf.runs.run_folder import Run, unique_id
from dtf.strategies.ddp import Ddp

HANG_S = 60.0
"""What takes as long hangs; no test judges by less."""
LONG_S = 600.0
"""A limit of which a test shows that nobody waits for it."""


@dataclass(frozen=True)
class Launched:
    code: int
    events: list[Event]
    folder: Path

    def of(self, kind: type) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def launch(
    entry: str, folder: Path, config: dict[str, Any] | None = None, strategy: Strategy | None = None, **options: Any
) -> Launched:
    """Run an entry on the ranks of two processes with the given options of launcher=local."""
    events: list[Event] = []
    settings = cast(Settings, SimpleNamespace(strategy=strategy or Ddp()))
    run = Run(folder, unique_id(), {"launcher": os.getpid(), "strategy": {"name": "ddp"}, **(config or {})}, settings)
    launcher: Local = build_option(
        "launcher",
        coerce_option("launcher", {"name": "local", "processes": 2, "devices": "cpu", **options}, "launcher"),
    )
    code = launcher.launch(run, events.append, entry)
    return Launched(code, events, folder)
