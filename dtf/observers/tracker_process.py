"""What runs in the process of a tracker: takes messages of the launching process and calls the tracker's library.

The library may block, raise or end the process. A file in the run folder says which run of the tracker it is and what
that has, so that a later launch goes on with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import math
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from dtf.core.files import replace_text
from dtf.core.json_lines import rows

_HEAD = {"split": str, "step": int}
_SAVED_STEPS = 100  # after so many the state is written, if there are more in one message
_MOST_NOTES = 50
_NICE = 5  # ranks come first
_AGAIN = "tried again with the next report"


class Step(NamedTuple):
    """All reports of a step. `values`: `<split>/<metric>` -> value, NaN where it was not finite."""

    step: int
    values: dict[str, float]
    at: float  # Unix time of the first, in seconds


class Backend(Protocol):
    """A tracker's library."""

    at_once: int  # steps that it is given in one call, of which it takes all or none

    def open(self, order: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        """Begin a run, or go on with the one that `known`, which an earlier launch returned, tells of. Returns what a
        later launch needs to know, in JSON. May be called again after it raised.
        """
        ...

    def sent(self) -> dict[str, int]:
        """Split -> the last step that the tracker has of it, as far as that can be asked."""
        ...

    def log(self, steps: list[Step]) -> None: ...

    def note(self, text: str) -> None:
        """Show the warnings of the run, all of them so far."""
        ...

    def end(self, outcome: dict[str, Any]) -> None:
        """End the run. `outcome`: `exit`, None where the launching process was killed, `cause`, and `best`, `seconds`,
        `values` where they are known.
        """
        ...


class _Feed:
    """Brings messages to the backend `name`, each report once."""

    def __init__(self, name: str, order: dict[str, Any], say: _Say) -> None:
        # slow, and of a library that may do anything
        self._backend: Backend = importlib.import_module(f"dtf.observers.{name}_backend").Backend()
        self._order, self._say = order, say
        folder = Path(order["folder"])
        self._path, self._name = folder / f"{name}.json", name
        self._lock = locked(folder / f".{name}.lock")  # an earlier process may still write
        self._state: dict[str, Any] = {"run": {}, "sent": {}, "notes": [], "launched": 0.0} | _read(self._path)
        # its launching process was killed, and the next has come here first
        self.is_late = self._state["launched"] > order["launched"]
        self._state["launched"] = order["launched"]
        self._open, self._has_warned, self.ended = False, False, False
        self._waiting: list[dict[str, Any]] = []
        self._first = True

    def take(self, message: dict[str, Any]) -> None:
        """One message. What the library does not take now waits for the next."""
        taken = 0
        match message["do"]:
            case "start":
                self._start(message)
            case "rows":
                self._waiting += [row | {"counts": 1} for row in message["rows"]]
            case "note":
                line = f"step {message['step']}: {message['text']}"
                self._state["notes"] = [*self._state["notes"], line][-_MOST_NOTES:]
        with self._tried("how the run ended is missing there" if message["do"] == "end" else _AGAIN):
            self._begin()
            if message["do"] == "note":
                self._backend.note("\n".join(self._state["notes"]))
            taken = self._log()
            if message["do"] == "end":
                self._backend.end(message)
                self.ended = True
        self._save()
        self._say(taken=taken, done=self.ended)

    def _start(self, message: dict[str, Any]) -> None:
        """The ranks are at a step. What an earlier launch measured up to it may not have come here."""
        step, sent = message["step"], max(self._state["sent"].values(), default=0)
        if sent > step:
            self._say(
                say=f"it has the steps {step + 1} to {sent} already, which are done again; they stay there as they "
                "were measured first"
            )
        path = self._order["metrics"]
        earlier = [row for row in rows(Path(path), _HEAD) if row["step"] <= step] if path and self._first else []
        self._waiting += earlier + [row for row in message["rows"] if row["step"] <= step]
        self._first = False

    def _begin(self) -> None:
        if not self._open:
            self._state["run"] = self._backend.open(self._order, self._state["run"])
            self._open = True
            for split, step in self._backend.sent().items():  # more than the file says, after a kill
                self._state["sent"][split] = max(step, self._state["sent"].get(split, step))
            self._save()

    def _log(self) -> int:
        """Returns how many of the reports that the launching process counts are over."""
        sent: dict[str, int] = self._state["sent"]
        new = [row for row in self._waiting if row["step"] > sent.get(row["split"], -1)]
        over = len(self._waiting)
        new.sort(key=lambda row: row["step"])
        steps = list(_steps(new))
        counted = sum(row.get("counts", 0) for row in self._waiting)
        for first in range(0, len(steps), self._backend.at_once):
            part = steps[first : first + self._backend.at_once]
            self._backend.log(part)
            for one in part:
                sent |= {key.partition("/")[0]: one.step for key in one.values}
            if first % _SAVED_STEPS == 0:
                self._save()
        del self._waiting[:over]
        return counted

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # a full disk
            replace_text(self._path, json.dumps(self._state, indent=1) + "\n")

    @contextlib.contextmanager
    def _tried(self, remedy: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the next report is another try
            traceback.print_exc()
            if not self._has_warned:
                text = " ".join(str(error).split())[:300]
                self._say(say=f"{type(error).__name__}: {text}; {remedy}, the run goes on")
                self._has_warned = True


def _steps(ordered: list[dict[str, Any]]) -> Iterator[Step]:
    for step, group in groupby(ordered, key=lambda row: row["step"]):
        values: dict[str, float] = {}
        at = 0.0
        for row in group:
            at = at or row.get("at", 0.0)
            values |= {
                f"{row['split']}/{key}": math.nan if value is None else value
                for key, value in row.items()
                if key not in ("split", "step", "at", "counts")
            }
        yield Step(step, values, at)


class _Say:
    """Answers to the launching process, as lines of JSON. It may be gone."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __call__(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()


def locked(path: Path) -> int | None:
    """Wait until no other process has the file. None on a file system without locks, or a full one."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
        sent = {str(split): int(step) for split, step in state["sent"].items()}
        notes = [str(line) for line in state["notes"]]
        return {"run": dict(state["run"]), "sent": sent, "notes": notes, "launched": float(state["launched"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def main(name: str) -> None:
    """Take messages from standard input until the last one, or until the launching process is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run ends in order, and then ends this process
    os.nice(_NICE)
    say = _Say(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    order = json.loads(sys.stdin.buffer.readline() or "null")
    if order is None:
        os._exit(0)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inbox, order["close_timeout_s"]), daemon=True).start()
    try:
        code = _feed(name, order, inbox, say)
    except SystemExit as error:  # by the library
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the log has it
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # whatever the library has left to do when an interpreter ends, it has had its time


def _feed(name: str, order: dict[str, Any], inbox: queue.SimpleQueue[dict[str, Any]], say: _Say) -> int:
    """Take messages up to the last one. Returns the exit code."""
    feed, message = _Feed(name, order, say), {"do": ""}
    if feed.is_late:
        return 0
    while message["do"] != "end":
        message = inbox.get()
        feed.take(message)
    return int(not feed.ended)


def _receive(inbox: queue.SimpleQueue[dict[str, Any]], close_timeout_s: float) -> None:
    """Read messages as they come: whether the library works or hangs, the launching process is heard to end."""
    for line in sys.stdin.buffer:
        with contextlib.suppress(ValueError):  # cut by a kill
            inbox.put(json.loads(line))
    inbox.put({"do": "end", "exit": None, "cause": "the launching process was killed"})
    threading.Event().wait(close_timeout_s)
    os.killpg(0, signal.SIGKILL)  # the tracker hangs, and nobody else is there to end it
