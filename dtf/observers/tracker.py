"""What observers share that pass a run to a tracker of experiments, such as Weights & Biases or MLflow.

What is sent is final: a report waits for the checkpoint that keeps it, since what comes after the last checkpoint is
done again when the run is killed, and a tracker takes nothing back.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dtf.api.observer import Observer, print_warning
from dtf.api.registry import name_of, option
from dtf.core.errors import STARTED_AGAIN, ConfigError, Exit
from dtf.core.run_record import LOCK
from dtf.core.text import count_text
from dtf.core.types import Ended, Event, Failed, Measured, Note, Saved, Started
from dtf.observers.measured_row import measured_row
from dtf.observers.tracker_link import MOST_REPORTS, TrackerLink

_ASKED_TO_STOP_S = 5.0
"""The most that a tracker gets at the end of a run that was asked to stop: whoever asked kills it soon."""
_GOES_ON = (*STARTED_AGAIN, Exit.BUDGET)
"""Exit codes after which the run may go on, and do again what came after its last checkpoint."""


class TrackerLost(Exception):
    """The process of a tracker has ended before the run."""


@dataclass(kw_only=True)
class Tracker(Observer):
    """Passes measurements, config, notes and the end of a run to a process in which the tracker's library works.

    That process may hang, die or raise: this one never waits for it before the run is over.
    """

    live: bool = option(
        default=False,
        doc="send each report at once; false: with the checkpoint that keeps it. A tracker takes nothing back: what a "
        "run does again after a kill stays there as it was measured first",
    )
    close_timeout_s: float = option(
        default=15.0,
        least=0,
        most=3600,
        doc="how long the end of the run waits for what the tracker has not yet taken",
        unit="s",
    )

    package = ""  # the library, as it is imported ...
    requirement = ""  # ... and as pip installs it

    def check(self) -> None:
        spec = importlib.util.find_spec(self.package)
        # such libraries write to a folder of their own name: without an origin it is that, in the current directory
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"observer={name_of('observer', self)} needs the package {self.package}, which is not installed; "
                f"{sys.executable} -m pip install '{self.requirement}'"
            )

    def open(self, folder: Path, config: dict) -> None:
        self._name, self._folder, self._config = name_of("observer", self), folder, config
        self._link: TrackerLink | None = None
        self._held: deque[dict[str, Any]] = deque()  # reports that a kill would have done again
        self._notes: list[dict[str, Any]] = []  # of the time before the ranks were ready
        self._step, self._outcome = 0, {"cause": ""}
        self._at_once = self.live or config.get("checkpoint", {}).get("every_steps") == 0  # nothing will ever keep them

    def see(self, event: Event) -> None:
        if self._link is not None and (why := self._link.failure):
            missing, self._link = _missing(self._link.lost + len(self._held), why), None
            raise TrackerLost(missing)
        match event:
            case Started():
                self._start(event)
            case Measured():
                self._step = event.step
                self._held.append(measured_row(event) | {"at": round(time.time(), 3)})
                if self._at_once or len(self._held) > MOST_REPORTS:
                    self._release(event.step)
            case Saved(step):
                self._release(step)
            case Note("warning", text):
                self._note(text)
            case Failed():
                self._step = event.step
                self._outcome = {"cause": event.message}
            case Ended(step, reason, values):
                self._step, self._outcome = step, {"cause": reason, "values": values}
                if reason in ("finished", "early_stop"):
                    self._release(step)

    def _start(self, event: Started) -> None:
        """The ranks are ready, for the first time or again: forget what they will do again."""
        if self._link is None:
            self._link = TrackerLink(self._name, self._folder, self._order(), self._warn)
        self._outcome, self._step = {"cause": ""}, event.step
        self._release(event.step)
        self._held.clear()
        self._link.send({"do": "start", "step": event.step, "rows": [measured_row(one) for one in event.recent]})
        for note in self._notes:
            self._link.send(note)
        self._notes = []

    def _order(self) -> dict[str, Any]:
        """What the tracker's process has to know of the run."""
        jsonl = self._config.get("observer", {}).get("jsonl")
        sweep = self._folder.parent
        return {
            "folder": str(self._folder),
            "options": {one.name: getattr(self, one.name) for one in fields(self)},
            "config": self._config,
            "group": sweep.name if (sweep / LOCK).exists() and not (sweep / "run.json").exists() else "",
            "metrics": str(self._folder / jsonl["path"]) if jsonl else "",
            "close_timeout_s": self.close_timeout_s,
            "launched": time.time(),
        }

    def _release(self, step: int) -> None:
        """Send the reports up to a step."""
        rows = []
        while self._held and self._held[0]["step"] <= step:
            rows.append(self._held.popleft())
        if rows and self._link is not None:
            self._link.send({"do": "rows", "rows": rows}, len(rows))

    def _note(self, text: str) -> None:
        note = {"do": "note", "step": self._step, "text": text}
        if self._link is not None:
            self._link.send(note)
        elif len(self._notes) < 100:
            self._notes.append(note)

    def _warn(self, text: str) -> None:
        print_warning(f"observer.{self._name}: {text}")

    def close(self) -> None:
        if self._link is None:
            return
        link, self._link = self._link, None
        outcome = self._outcome | _end_of(self._folder)
        if outcome["exit"] not in _GOES_ON:
            rows = list(self._held)
            link.send({"do": "rows", "rows": rows}, len(rows))
        asked = outcome["exit"] == Exit.PREEMPTED
        within = min(self.close_timeout_s, _ASKED_TO_STOP_S) if asked else self.close_timeout_s
        if why := link.close({"do": "end", **outcome}, within):
            self._warn(_missing(link.lost, why))


def _missing(reports: int, why: str) -> str:
    what = count_text(reports, "report") if reports else "the end"
    return f"{why}; {what} of the run may be missing there"


def _end_of(folder: Path) -> dict[str, Any]:
    """Exit code, cause and best value of the run, which is over, as run.json says them."""
    try:
        record = json.loads((folder / "run.json").read_text())
        known = {key: record[key] for key in ("cause", "best", "seconds") if record.get(key)}
        return {**known, "exit": record["exit"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {"exit": None}
