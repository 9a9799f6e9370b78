"""Writes every event of a run with its time, for programs that look into what happened to it."""

from __future__ import annotations

import json
import math
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from dtf.api.observer import Observer
from dtf.api.registry import register
from dtf.core.types import Event, event_to_json

NAME = "events.jsonl"


@register("observer", "events")
class Events(Observer):
    """Append every event to events.jsonl in the run folder: starts, restarts, warnings, measurements, saves, failures.

    `{"at": seconds of the host's clock, "monotonic": seconds of time.monotonic(), "event": its kind, ...}`. Unlike
    metrics.jsonl it also keeps what was done again.
    """

    def open(self, folder: Path, config: dict) -> None:
        self._file: TextIOWrapper | None = (folder / NAME).open("a", encoding="utf-8")

    def see(self, event: Event) -> None:
        if self._file is not None:
            line = {"at": round(time.time(), 6), "monotonic": round(time.monotonic(), 6)} | event_to_json(event)
            line.pop("recent", None)  # they have lines of their own
            self._file.write(json.dumps(_finite(line)) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def _finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, which strict JSON does not have."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(part) for key, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
    return value
