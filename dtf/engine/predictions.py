"""Predictions of a model: files that grow in the order of rows and can be resumed, and a confusion table.

Torch-free.
"""

from __future__ import annotations

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dtf.core.errors import DataError

if TYPE_CHECKING:
    from dtf.core.types import Names


class Prediction(NamedTuple):
    """The answer to one row."""

    id: int
    label: float | None  # what it is, where that is one number
    classes: list[int]  # the most probable first
    probabilities: list[float]  # of these; of the one event where there are no classes
    width: int  # number of classes; 0: there is one event, which happens or not
    error: str = ""  # why the row cannot be read; then there is no answer

    def pairs(self) -> list[tuple[int, float]]:
        """Classes with their probabilities, which have as many digits as fp32."""
        return [
            (c, float(f"{probability:.8g}")) for c, probability in zip(self.classes, self.probabilities, strict=True)
        ]

    def guess(self) -> int:
        """The class it is taken for."""
        return self.classes[0] if self.width else int(self.probabilities[0] >= 0.5)


def named(names: Sequence[str], index: int) -> str:
    """The name of a class, its number where it has none."""
    return names[index] if index < len(names) else str(index)


class ConfusionTable:
    """How often rows of each class were taken for it, and for others; nothing of an event whose two sides have no
    names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._pairs = Counter[tuple[int, int]]()  # what it is, and what it was taken for
        self._width = 0

    def add(self, rows: Sequence[Prediction]) -> None:
        for row in rows:
            if row.label is not None:
                self._width = row.width or len(self._names)
                self._pairs[int(row.label), row.guess()] += 1

    def classes(self) -> list[dict[str, Any]]:
        """For each class: its rows, rows predicted as it, recall and precision; None in place of a division by zero."""

        def share(part: int, whole: int) -> float | None:
            return part / whole if whole else None

        rows, guessed = Counter[int](), Counter[int]()
        for (label, guess), count in self._pairs.items():
            rows[label] += count
            guessed[guess] += count
        return [
            {
                "class": named(self._names, c),
                "rows": rows[c],
                "predicted": guessed[c],
                "recall": share(self._pairs[c, c], rows[c]),
                "precision": share(self._pairs[c, c], guessed[c]),
            }
            for c in range(self._width)
        ]

    def confusions(self) -> list[list[int]]:
        """[what it is, what it was taken for, rows] by numbers of classes, of those that differ; the most rows first.
        Empty where there is no table of classes.
        """
        pairs = [[label, guess, rows] for (label, guess), rows in self._pairs.items() if label != guess and self._width]
        return sorted(pairs, key=lambda pair: (-pair[2], *pair))


class Predictions(ABC):
    """A file of predictions, a line for each row, in order of rows."""

    header = 0  # lines before the first row

    def __init__(self, path: Path, names: Sequence[str], top: int) -> None:
        self.path, self._names, self._top = path, names, top

    def open(self) -> tuple[int, int]:
        """How many rows it holds, and how many of them have an error. A line that was cut short is taken away.
        DataError when it is no such file.
        """
        if not self.path.exists():
            self.path.touch(mode=0o600)
        with self.path.open("r+b") as file:
            lines, size, errors = 0, 0, 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if lines < self.header and line.decode(errors="replace") != self._head():
                    raise DataError(f"{self.path} has other columns; move it away to start anew")
                errors += lines >= self.header and self._has_error(line.decode(errors="replace"))
                lines, size = lines + 1, size + len(line)
                last = line
            file.truncate(size)
        rows = lines - self.header
        if rows > 0 and self._row(last.decode(errors="replace")) != rows - 1:
            raise DataError(
                f"{self.path} ends with another row than its number of lines says; move it away to start anew"
            )
        return max(rows, 0), errors

    def append(self, rows: Sequence[Prediction], inputs: Names | None) -> None:
        """Add rows that follow those it holds."""
        start = self._head() if not self.path.stat().st_size else ""
        text = start + "".join(self._line(row, inputs[row.id] if inputs is not None else None) for row in rows)
        with self.path.open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())

    @abstractmethod
    def _head(self) -> str: ...

    @abstractmethod
    def _line(self, row: Prediction, name: str | None) -> str: ...

    @abstractmethod
    def _has_error(self, line: str) -> bool: ...

    @abstractmethod
    def _row(self, line: str) -> int:
        """The number of the row in a line; -1 when it is none."""


class JsonLines(Predictions):
    """`{"row": 0, "input": "a.jpg", "class": "cat", "probability": 0.93, "top": [["cat", 0.93], ...]}`, or `{"row": 1,
    "input": "b.jpg", "error": "it is empty"}`.
    """

    def _head(self) -> str:
        return ""

    def _line(self, row: Prediction, name: str | None) -> str:
        line: dict[str, Any] = {"row": row.id} | ({} if name is None else {"input": name})
        if row.error:
            return json.dumps(line | {"error": _error(row, name)}) + "\n"
        if row.width:
            line |= {"class": named(self._names, row.classes[0])}
        line |= {"probability": row.pairs()[0][1]}
        if row.width:
            line |= {"top": [[named(self._names, c), probability] for c, probability in row.pairs()]}
        return json.dumps(line) + "\n"

    def _has_error(self, line: str) -> bool:
        return '"error": ' in line  # inside of a text the quotes would be escaped

    def _row(self, line: str) -> int:
        try:
            return int(json.loads(line)["row"])
        except (ValueError, KeyError, TypeError):
            return -1


class Csv(Predictions):
    """`row,input,class,probability,class_2,probability_2,...,error`; the first line says which."""

    header = 1

    def _head(self) -> str:
        later = [f"{what}_{k}" for k in range(2, self._top + 1) for what in ("class", "probability")]
        return _csv(["row", "input", "class", "probability", *later, "error"])

    def _line(self, row: Prediction, name: str | None) -> str:
        pairs = [
            x for c, probability in row.pairs() for x in (named(self._names, c) if row.width else "", repr(probability))
        ]
        if row.error:
            return _csv([str(row.id), name or "", *[""] * (2 * self._top), _error(row, name)])
        return _csv([str(row.id), name or "", *pairs, *[""] * (2 * self._top - len(pairs)), ""])

    def _has_error(self, line: str) -> bool:
        return not line.endswith(",\n")

    def _row(self, line: str) -> int:
        first = line.partition(",")[0]
        return int(first) if first.isdecimal() else -1


def _error(row: Prediction, name: str | None) -> str:
    """Why there is no answer, without the name that stands beside it."""
    return row.error.removeprefix(f"{name}: ")


def _csv(cells: Sequence[str]) -> str:
    """One line; what would not stay on it is escaped."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(
        [cell if cell.isprintable() else cell.encode("unicode_escape").decode() for cell in cells]
    )
    return text.getvalue()


class Kind(Enum):
    """Forms of a file of predictions."""

    jsonl = "jsonl"
    csv = "csv"

    def file(self, folder: Path, names: Sequence[str], top: int) -> Predictions:
        return (JsonLines if self is Kind.jsonl else Csv)(folder / f"predictions.{self.value}", names, top)
