"""What the kit found: JSON lines as it goes, and a summary in Markdown that is written anew after each step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class NotRun(Exception):
    """A step, or a part of one, cannot run here; the message says why."""


class Lines:
    """A file of JSON lines, to which several processes may append."""

    def __init__(self, path: Path, step: str) -> None:
        self.path, self.step = path, step

    def write(self, kind: str, **values: Any) -> None:
        line = json.dumps({"step": self.step, "kind": kind, **values}, default=str) + "\n"
        with self.path.open("a") as file:  # one write to a file opened for appending is never torn
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        print(line, end="", flush=True)

    def part(self, name: str, ok: bool, reason: str = "", **values: Any) -> None:
        """The outcome of a part of a step."""
        self.write("part", name=name, state=PASSED if ok else FAILED, reason=reason, **values)

    def not_run(self, name: str, reason: str) -> None:
        self.write("part", name=name, state=NOT_RUN, reason=reason)

    def figure(self, name: str, value: Any, unit: str = "", **values: Any) -> None:
        self.write("figure", name=name, value=value, unit=unit, **values)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file; a process that was killed may leave half a line."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def state_of(lines: list[dict[str, Any]]) -> tuple[str, str]:
    """(state, reason) of a step that ended by itself, from its parts: one that failed decides."""
    parts = [line for line in lines if line["kind"] == "part"]
    for state in (FAILED, PASSED):
        chosen = [part for part in parts if part["state"] == state]
        if chosen:
            reasons = [f"{part['name']}: {part['reason']}" for part in parts if part["state"] != PASSED]
            return state, "; ".join(reasons)
    return NOT_RUN, "; ".join(part["reason"] for part in parts) or "it says nothing"


def summary(lines: list[dict[str, Any]], title: str, rehearsed: bool) -> str:
    """The Markdown page."""
    text = [f"# {title}", ""]
    if rehearsed:
        text += ["**A rehearsal without a GPU, at tiny sizes: no figure here means anything.**", ""]
    text += [f"- {line['text']}" for line in lines if line["kind"] == "note"]
    text += ["", "| step | state | seconds | reason |", "| --- | --- | --- | --- |"]
    ends = [line for line in lines if line["kind"] == "end"]
    text += [
        f"| {line['step']} | {line['state']} | {line.get('seconds', 0):.0f} | {_cell(line['reason'])} |"
        for line in ends
    ]
    steps = list(dict.fromkeys(line["step"] for line in lines if line["kind"] in ("part", "figure")))
    for step in steps:
        text += ["", f"## {step}", ""]
        for line in lines:
            if line["step"] == step and line["kind"] in ("part", "figure"):
                text.append(_bullet(line))
    return "\n".join(text) + "\n"


def _bullet(line: dict[str, Any]) -> str:
    more = {key: value for key, value in line.items() if key not in _HEAD and value not in ("", None)}
    rest = ", ".join(f"{key} {value}" for key, value in more.items())
    if line["kind"] == "figure":
        return f"- {line['name']}: {line['value']} {line.get('unit', '')}{f' ({rest})' if rest else ''}"
    reason = f": {line['reason']}" if line.get("reason") else ""
    return f"- {line['name']}: **{line['state']}**{reason}{f' ({rest})' if rest else ''}"


_HEAD = frozenset({"step", "kind", "name", "state", "reason", "value", "unit"})


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:600]
