"""Lists as Slurm writes them: of nodes, `node[01-03,7],other`; of tasks, `0-7%4`."""

from __future__ import annotations

import re

from dtf.core.errors import ConfigError

MOST = 65_536
"""Nodes in one list."""

_PART = re.compile(r"[^,\[\]]*(?:\[[0-9,-]+\][^,\[\]]*)*")
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def node_names(text: str) -> list[str]:
    """The nodes in order. ConfigError for what is no such list."""
    names: list[str] = []
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        assert part is not None  # it matches nothing too
        if not part[0] or (part.end() < len(text) and text[part.end()] != ","):
            raise _no_list(text)
        names += _expanded(part[0], text)
        at = part.end() + 1
    if not names or text.endswith(","):
        raise _no_list(text)
    return names


def per_node(text: str) -> list[int]:
    """Tasks of each node from `4(x2),3`: 4, 4, 3. ConfigError for what is no such list."""
    groups = re.fullmatch(r"[0-9]{1,9}(\(x[0-9]{1,5}\))?(,[0-9]{1,9}(\(x[0-9]{1,5}\))?)*", text)
    if not groups:
        raise ConfigError(f"{text[:80]!r} is no list of tasks like 4(x2),3; Slurm sets it")
    pairs = re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text)
    return [int(tasks) for tasks, times in pairs for _ in range(int(times or 1))]


def task_numbers(text: str) -> list[int]:
    """Tasks of an array from `0-2,7%4`, of which four run at once: 0, 1, 2, 7. ConfigError for what is no such list."""
    parts = re.fullmatch(r"([0-9,:-]+)(?:%[0-9]+)?", text)
    numbers: list[int] = []
    for part in parts[1].split(",") if parts else [""]:
        found = _TASKS.fullmatch(part)
        if not found:
            raise ConfigError(f"{text[:80]!r} is no list of tasks like 0-2,7%4; Slurm sets it")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        numbers += range(first, min(last, first + MOST) + 1, step or 1)
    return numbers


def _expanded(part: str, text: str) -> list[str]:
    opening = part.find("[")
    if opening < 0:
        return [part]
    closing = part.index("]", opening)
    rest = _expanded(part[closing + 1 :], text) if part[closing + 1 :] else [""]
    names = []
    for span in part[opening + 1 : closing].split(","):
        found = _RANGE.fullmatch(span)
        if not found:
            raise _no_list(text)
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < MOST:
            raise _no_list(text)
        names += [
            f"{part[:opening]}{number:0{len(first)}d}{end}"
            for number in range(int(first), int(last) + 1)
            for end in rest
        ]
        if len(names) > MOST:
            raise _no_list(text)
    return names


def _no_list(text: str) -> ConfigError:
    return ConfigError(f"{text[:80]!r} is no list of nodes like node[01-03,7],other; Slurm sets it")
