"""Lists as Slurm writes them: of nodes, `node[01-03,7],other`; of tasks, `0-7%4`."""

from __future__ import annotations

import re

from dtf.core.errors import ConfigError

MOST = 65_536
"""Nodes in one list."""
MOST_TASKS = 4_000_001
"""Tasks of an array: Slurm has no more."""

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
        if len(names) > MOST:
            raise _no_list(text)
        at = part.end() + 1
    if not names or text.endswith(","):
        raise _no_list(text)
    return names


def per_node(text: str) -> list[int]:
    """Tasks of each node from `4(x2),3`: 4, 4, 3. ConfigError for what is no such list."""
    groups = re.fullmatch(r"[0-9]{1,9}(\(x[0-9]{1,5}\))?(,[0-9]{1,9}(\(x[0-9]{1,5}\))?)*", text)
    if not groups:
        raise ConfigError(f"{text[:80]!r} is no list of tasks like 4(x2),3; Slurm sets it")
    pairs = [(int(tasks), int(times or 1)) for tasks, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text)]
    if sum(times for _, times in pairs) > MOST:
        raise ConfigError(f"{text[:80]!r} is of more than {MOST:,} nodes; Slurm sets it")
    return [tasks for tasks, times in pairs for _ in range(times)]


def task_numbers(text: str) -> list[int]:
    """Tasks of an array from `0-2,7%4`, of which four run at once: 0, 1, 2, 7. ConfigError for what is no such list."""
    parts = re.fullmatch(r"([0-9,:-]+)(?:%[0-9]+)?", text)
    numbers: list[int] = []
    for part in parts[1].split(",") if parts else [""]:
        found = _TASKS.fullmatch(part)
        if not found:
            raise ConfigError(f"{text[:80]!r} is no list of tasks like 0-2,7%4; Slurm sets it")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        numbers += range(first, min(last, first + MOST_TASKS) + 1, step or 1)
        if len(numbers) > MOST_TASKS:
            raise ConfigError(f"{text[:80]!r} is of more than {MOST_TASKS:,} tasks; Slurm sets it")
    return numbers


def _expanded(part: str, text: str) -> list[str]:
    """The names of one part, the last pair of brackets counting fastest."""
    names = [""]
    for plain, spans in re.findall(r"([^\[]*)(?:\[([0-9,-]+)\])?", part):
        numbers = [""]
        if spans:
            numbers = []
            for span in spans.split(","):
                numbers += _span(span, text)
                if len(numbers) > MOST:
                    raise _no_list(text)
        if len(names) * len(numbers) > MOST:
            raise _no_list(text)
        names = [f"{name}{plain}{number}" for name in names for number in numbers]
    return names


def _span(span: str, text: str) -> list[str]:
    """`08-10` -> 08, 09, 10."""
    found = _RANGE.fullmatch(span)
    if not found:
        raise _no_list(text)
    first, last = found[1], found[2] or found[1]
    if not 0 <= int(last) - int(first) < MOST:
        raise _no_list(text)
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _no_list(text: str) -> ConfigError:
    return ConfigError(f"{text[:80]!r} is no list of nodes like node[01-03,7],other; Slurm sets it")
