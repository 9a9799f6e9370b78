"""The record of a server, as JSON lines: the order of what trainers pulled, and which pushes became an update."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dtf.core.errors import DataError, SaveError
from dtf.core.files import open_private
from dtf.core.types import Train
from dtf.pserver.push import Push


class Pull(NamedTuple):
    """Which trainer pulled for which step. All numbers, so that it is written as a row of them."""

    trainer: int
    step: int  # of the lease: the first one's
    part: int
    at: int  # step of the ticket it was for


class Recorder:
    """Records what happens on one server from step `start` on, appending. SaveError where it cannot write."""

    def __init__(self, folder: Path, server: int, start: int) -> None:
        self._path = path_of(folder, server)
        with self._saving():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = open_private(self._path, "a")
            if self._file.tell():
                self._file.write("\n")  # a server that was killed may have left half a line
        self._write({"start": start})

    def opened(self, tickets: Sequence[Train]) -> None:
        """Leases of these tickets may be granted."""
        self._write({"open": [[t.step, t.epoch, t.index, t.rows, t.lr] for t in tickets]})

    def pulled(self, pull: Pull, applied: int) -> None:
        """A trainer pulled, after so many updates."""
        self._write({"pull": [*pull], "applied": applied})

    def applied(self, pushes: Iterable[Push]) -> None:
        """These pushes became one update."""
        self._write({"apply": [[push.trainer, push.step, push.part, push.seen] for push in pushes]})
        with self._saving():
            self._file.flush()

    def close(self) -> None:
        with self._saving():
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        with self._saving():
            self._file.write(json.dumps(line) + "\n")

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turn OSError into SaveError: a full or broken disk is no defect of the program."""
        try:
            yield
        except OSError as error:
            raise SaveError(
                f"{self._path} could not be written: {error.strerror}; make room or mend the disk, then start again"
            ) from None


def path_of(folder: Path, server: int) -> Path:
    """The record file of a server."""
    return folder / f"order_server_{server}.jsonl"


class RecordedOrder(NamedTuple):
    """The last attempt of a run. `start`: the step it began with."""

    start: int
    updates: list[int]  # by server
    events: list[Iterator[dict[str, Any]]]  # what happened on each server, read as it is asked for


def read(folder: Path, servers: int) -> RecordedOrder:
    """Read the records of all servers of a run. DataError where one cannot be read."""
    starts, updates, events = set(), [], []
    for server in range(servers):
        path = path_of(folder, server)
        at, start, begin, applied = 0, None, 0, 0
        try:
            with path.open("rb") as file:
                for line in file:
                    at += len(line)
                    if line.startswith(b'{"start"'):
                        start, begin, applied = int(json.loads(line)["start"]), at, 0
                    applied += line.startswith(b'{"apply"') and line.endswith(b"}\n")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}; a run records its order with strategy.record=PATH"
            ) from None
        if start is None:
            raise DataError(f"{path} does not say where it starts")
        starts.add(start)
        updates.append(applied)
        events.append(_events(path, begin))
    if len(starts) != 1:
        raise DataError(f"the servers of {folder} recorded different attempts; it was killed while they started")
    return RecordedOrder(starts.pop(), updates, events)


def _events(path: Path, begin: int) -> Iterator[dict[str, Any]]:
    """Lines from the byte `begin` on; a line that a killed server left unfinished is skipped."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            for line in file:
                if line.endswith(b"}\n"):
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
