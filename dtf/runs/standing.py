"""How a run stands, by its folder: whether it lives, how far it is, how it has ended. Changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtf.checkpoint.storage import checkpoints, step_of
from dtf.core.errors import BusyError, Exit, code_name
from dtf.core.json_lines import row_of
from dtf.core.run_record import is_live
from dtf.core.text import number_text

_NAME = "run.json"
_TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl in which the newest measurements are looked for."""


@dataclass(frozen=True)
class Standing:
    """`launches`: how often it was started. `saved`: the step of its newest checkpoint. `newest`: of each split, the
    newest measurement in metrics.jsonl, with its step. `exit`, `ended`: of the last launch, None where it has not ended
    or was killed.
    """

    id: str
    live: bool
    launches: int
    started: str
    ended: str | None
    exit: int | None
    cause: str
    saved: int | None
    newest: dict[str, dict[str, float]]

    @property
    def state(self) -> str:
        """In a few words: `running`, `killed`, `ended with E_PREEMPTED: ...`."""
        if self.live:
            return "running"
        if self.exit is None:
            return "killed, or its host is not this one"
        known = code_name(Exit(self.exit)) if self.exit in set(Exit) else f"exit code {self.exit}"
        if self.exit == Exit.OK:
            return "stopped at train.until" if self.cause == "stopped" else "finished"
        return f"ended with {known}: {self.cause}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state}


def standing(folder: Path) -> Standing | None:
    """Of the run in a folder; None where there is none. BusyError when its record cannot be read."""
    try:
        record = json.loads((folder / _NAME).read_text())
        saved = checkpoints(folder / "checkpoints")
        return Standing(
            id=str(record["id"]),
            live=record["ended"] is None and is_live(folder, str(record["id"])),
            launches=1 + len(record.get("earlier", [])),
            started=str(record["started"]),
            ended=record["ended"],
            exit=record["exit"],
            cause=str(record["cause"]),
            saved=max((step_of(path.name) or 0 for path in saved), default=None),
            newest=_newest(folder / "metrics.jsonl"),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BusyError(f"{folder / _NAME} cannot be read ({type(error).__name__}: {error})") from error


def runs_in(folder: Path) -> Iterator[tuple[str, Standing]]:
    """The runs of a sweep by the names of their folders."""
    for path in sorted(folder.iterdir()):
        found = standing(path) if path.is_dir() else None
        if found is not None:
            yield path.name, found


def lines(found: Standing) -> Iterator[str]:
    """A standing as text."""
    again = f", launch {found.launches}" if found.launches > 1 else ""
    yield f"run {found.id}{again}: {found.state}"
    if found.saved is not None:
        yield f"newest checkpoint: step {found.saved:,}"
    for split, values in found.newest.items():
        shown = " ".join(f"{name}={number_text(value)}" for name, value in values.items() if name != "step")
        yield f"{split} at step {values['step']:,.0f}: {shown}"


def _newest(path: Path) -> dict[str, dict[str, float]]:
    newest: dict[str, dict[str, float]] = {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            for line in file.read().splitlines():
                row = row_of(line, {"split": str, "step": int})
                if row is not None:
                    split = row.pop("split")
                    newest[split] = {name: value for name, value in row.items() if value is not None}
    except OSError:
        pass
    return newest
