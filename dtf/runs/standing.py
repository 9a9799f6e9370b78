"""How a run stands, by its folder: whether it lives, how far it is, how it has ended. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtf.checkpoint.storage import checkpoints, step_of
from dtf.core.errors import BusyError, Exit, code_name
from dtf.core.files import open_regular
from dtf.core.json_lines import row_of
from dtf.core.run_record import is_live, record_of
from dtf.core.text import StepRate, about_text, number_text
from dtf.runs.objective_log import plan_of

_NAME = "run.json"
_TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl in which the newest measurements are looked for."""


@dataclass(frozen=True)
class Standing:
    """`launches`: how often it was started. `saved`: the step of its newest checkpoint. `newest`: of each split, the
    newest measurement in metrics.jsonl, with its step. `exit`, `ended`: of the last launch, None where it has not ended
    or was killed. `total`: steps of the whole run, `left_s`: about how many seconds they take from the newest
    measurement on, None where that is not known.
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
    total: int | None
    left_s: float | None

    @property
    def step(self) -> int | None:
        """How far it is: of a live run by its newest measurement; otherwise by what it goes on from."""
        seen = int(self.newest.get("train", {}).get("step", 0)) if self.live or self.exit == Exit.OK else 0
        return max(seen, self.saved or 0) or self.saved

    @property
    def progress(self) -> str:
        """`step 1,200 of 5,000, 24 %, about 1 h 10 min left`; empty where nothing is known."""
        if not self.total:
            return ""
        left = f", about {about_text(self.left_s)} left" if self.live and self.left_s is not None else ""
        step = self.step or 0
        return f"step {step:,} of {self.total:,}, {100 * step // self.total} %{left}"

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
        record = record_of(folder)
        for key, kind in (("id", str), ("ended", str | None), ("exit", int | None)):
            if not isinstance(record[key], kind):
                raise TypeError(f"{key}={str(record[key])[:80]}")
        saved = checkpoints(folder / "checkpoints")
        # of a launch that is not ready yet: that of the one before
        plan = next(filter(None, map(plan_of, [record, *reversed(record.get("earlier", []))])), None)
        newest, rate = _newest(folder / "metrics.jsonl")
        to_go = plan[0] - newest.get("train", {}).get("step", 0) if plan else None
        return Standing(
            id=record["id"],
            live=record["ended"] is None and is_live(folder, record["id"]),
            launches=1 + len(record.get("earlier", [])),
            started=str(record["started"]),
            ended=record["ended"],
            exit=record["exit"],
            cause=str(record["cause"]),
            saved=max((step_of(path.name) or 0 for path in saved), default=None),
            newest=newest,
            total=plan[0] if plan else None,
            left_s=None if to_go is None else rate.seconds_for(int(to_go)),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BusyError(f"{folder / _NAME} cannot be read ({type(error).__name__}: {error})") from error


def runs_in(folder: Path) -> Iterator[tuple[str, Standing]]:
    """The runs of a sweep by the names of their folders."""
    for path in sorted(folder.iterdir()):
        found = standing(path) if path.is_dir() else None
        if found is not None:
            yield path.name, found


def lines(found: Standing, state: str = "") -> Iterator[str]:
    """A standing as text. `state`: in the words of who knows more of it than the folder."""
    again = f", launch {found.launches}" if found.launches > 1 else ""
    yield f"run {found.id}{again}: {state or found.state}"
    if found.progress:
        yield found.progress
    if found.saved is not None:
        yield f"newest checkpoint: step {found.saved:,}"
    for split, values in found.newest.items():
        shown = " ".join(f"{name}={number_text(value)}" for name, value in values.items() if name != "step")
        yield f"{split} at step {values['step']:,.0f}: {shown}"


def _newest(path: Path) -> tuple[dict[str, dict[str, float]], StepRate]:
    """The newest measurement of each split, and the pace of training in this launch."""
    newest: dict[str, dict[str, float]] = {}
    rate, seconds = StepRate(), 0.0
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            for line in file.read().splitlines():
                row = row_of(line, {"split": str, "step": int})
                if row is None:
                    continue
                split = row.pop("split")
                newest[split] = {name: value for name, value in row.items() if value is not None}
                now = newest[split].get("seconds", 0.0)
                if now < seconds:  # a later launch, which counts from 0
                    rate = StepRate()
                seconds = now
                if split == "train":
                    rate.mark(row["step"], now)
    except OSError:
        pass
    return newest, rate
