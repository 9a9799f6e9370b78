"""Lines of JSON from files that may come from elsewhere: which of them are rows of a kind, and which are not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LONGEST = 1 << 20  # bytes of a line
_LONGEST_TEXT = 1000
_LARGEST = {int: 1 << 53, float: 1e100}  # what sums, charts and tables can hold

Kinds = Mapping[str, type]


def row_of(line: bytes, kinds: Kinds) -> dict[str, Any] | None:
    """The row in a line: an object that has these keys with values of these kinds. None for any other line.

    Of its other keys it has those whose value is a finite number or null. An `int` is a count, a `float` any number.
    """
    try:
        row = json.loads(line) if len(line) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(key in row and _fits(row[key], kind) for key, kind in kinds.items()):
        return None
    return {key: value for key, value in row.items() if key in kinds or value is None or _fits(value, float)}


def rows(path: Path, kinds: Kinds) -> Iterator[dict[str, Any]]:
    """The rows of a file; none where there is no file. Other lines are skipped, and none is held in memory whole."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        continued = False
        while line := file.readline(_LONGEST + 2):
            row = None if continued else row_of(line, kinds)
            continued = not line.endswith(b"\n")
            if row is not None:
                yield row


def _fits(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str) and len(value) <= _LONGEST_TEXT
    if kind is int:
        return type(value) is int and 0 <= value <= _LARGEST[int]
    return type(value) in (int, float) and abs(value) <= _LARGEST[float]  # NaN is not
