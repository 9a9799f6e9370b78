"""Writes measurements as JSON lines, for programs.

A resumed run leaves the same file as one without interruption, apart from times.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import IO

from dtf.api.observer import Observer, print_warning
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError
from dtf.core.files import naming, open_private
from dtf.core.json_lines import row_of, rows
from dtf.core.text import count_text
from dtf.core.types import Event, Measured, Started
from dtf.observers.measured_row import measured_row

_HEAD = {"split": str, "step": int}
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
        self._file: IO[str] | None = open_private(self._path, "a")

    def see(self, event: Event) -> None:
        match event:
            case Started():
                self.close()
                if odd := forget_after(self._path, event.step):
                    print_warning(f"{self._path} has {count_text(odd, 'line')} of no measurement, left as they are")
                known = {(row["split"], row["step"]) for row in rows(self._path, _HEAD)}
                self._file = open_private(self._path, "a")
                for measured in event.recent:
                    if (measured.split, measured.step) not in known:
                        self._write(measured)
            case Measured() if self._file is not None:
                self._write(event)

    def _write(self, measured: Measured) -> None:
        assert self._file is not None
        with naming(self._path):
            self._file.write(line_of(measured) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def line_of(event: Measured) -> str:
    """One measurement as strict JSON."""
    return json.dumps(measured_row(event), allow_nan=False)


def forget_after(path: Path, step: int) -> int:
    """Remove the lines of steps after `step`, and the incomplete last line of a killed writer. Lines that are no
    measurements are left as they are; returns how many.

    Atomic: a crash leaves the old file or the new one.
    """
    if not path.exists():
        return 0
    before = path.read_bytes()
    *whole, last = before.split(b"\n")
    whole += [last] if row_of(last, _HEAD) else []  # it lost its end alone
    found = [row_of(line, _HEAD) for line in whole]
    kept = [line for line, row in zip(whole, found, strict=True) if row is None or row["step"] <= step]
    after = b"".join(line + b"\n" for line in kept)
    if after != before:
        new = path.with_name(f"{path.name}.tmp")
        with open_private(new, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    return found.count(None)
