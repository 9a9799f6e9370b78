"""Writes measurements as JSON lines, for programs.

A resumed run leaves the same file as one without interruption, apart from times.
"""

from __future__ import annotations

import json
import math
import os
import re
from io import TextIOWrapper
from pathlib import Path

from dtf.api.observer import Observer
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError
from dtf.core.files import open_private
from dtf.core.types import Event, Measured, Started

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}\.jsonl")


@register("observer", "jsonl")
class Jsonl(Observer):
    """Append every measurement to a file: `{"split", "step", "epoch", "seconds", <metric>...}`; a number that is not
    finite is `null`.
    """

    path: str = option(default="metrics.jsonl", doc="name of the file in the run folder; it ends in .jsonl")

    def check(self) -> None:
        if not _NAME.fullmatch(self.path):
            raise ConfigError(
                f"observer.jsonl.path={self.path!r} is no name of a file in the run folder; letters, digits, '.', "
                "'_', '-', and .jsonl at the end"
            )

    def open(self, folder: Path, config: dict) -> None:
        self._path = folder / self.path
        self._file: TextIOWrapper | None = self._appended()

    def _appended(self) -> TextIOWrapper:
        return open_private(self._path, "a")

    def see(self, event: Event) -> None:
        match event:
            case Started():
                self.close()
                forget_after(self._path, event.step)
                known = _known(self._path)
                self._file = self._appended()
                for measured in event.recent:
                    if (measured.split, measured.step) not in known:
                        self._write(measured)
            case Measured() if self._file is not None:
                self._write(event)

    def _write(self, measured: Measured) -> None:
        assert self._file is not None
        self._file.write(line_of(measured) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def line_of(event: Measured) -> str:
    """One measurement as strict JSON: any parser reads it, which Python's NaN and Infinity would prevent."""
    head = {"split": event.split, "step": event.step, "epoch": event.epoch, "seconds": round(event.seconds, 3)}
    line = head | event.values | head  # a metric of the same name hides none of the four
    return json.dumps(
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()},
        allow_nan=False,
    )


def forget_after(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, and the incomplete last line of a killed writer.

    Atomic: a crash leaves the old file or the new one.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    after = b"".join(line + b"\n" for line in before.split(b"\n") if _step(line) <= step)
    if after == before:
        return
    new = path.with_name(f"{path.name}.tmp")
    with open_private(new, "wb") as file:
        file.write(after)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _known(path: Path) -> set[tuple[str, int]]:
    """(split, step) of every line."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return {(line["split"], line["step"]) for line in lines}


def _step(line: bytes) -> float:
    """Infinity for what is no whole line of this file."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
