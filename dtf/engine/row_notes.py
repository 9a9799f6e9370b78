"""What a run says of files that are no rows, and of rows that cannot be read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtf.api.recipe import Dataset
from dtf.core.files import replace_text
from dtf.core.text import plain_text
from dtf.core.types import Note
from dtf.engine.divergence import Everyone

LEFT_OUT = "left_out.txt"
"""The file in the run folder that names what was left out."""

_KINDS = 8
"""Kinds of files that a line counts, for one reason; more are added up."""

_NAMED = 5
"""Rows that a line names."""

_LONGEST = 255
"""Characters of a name in the file, and more where it is escaped: no file system has longer ones."""


def note_left_out(datasets: Sequence[Dataset], folder: Path) -> Note | None:
    """What to say at the start of files that were found and are no rows; None: there are none. Called on rank 0.

    Writes their names into LEFT_OUT in the run folder.
    """
    left_out: dict[str, str] = {}
    for rows in datasets:
        left_out |= rows.left_out
    if not left_out:
        return None
    lines = (f"{_one_line(name)}\t{_one_line(why)}\n" for name, why in sorted(left_out.items()))
    replace_text(folder / LEFT_OUT, "".join(lines))
    return Note("info", f"left out: {left_out_text(left_out)}; {LEFT_OUT} in the run folder names them")


def left_out_text(left_out: Mapping[str, str]) -> str:
    """How many of each kind, by reason: `6 .heic, 1 .txt (no image); 2 .DS_Store (hidden)`."""
    reasons: dict[str, Counter[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why.partition(",")[0], Counter())[_kind(name)] += 1
    texts = []
    for why, kinds in sorted(reasons.items(), key=lambda item: (-item[1].total(), item[0])):
        shown = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
        parts = [f"{count:,} {plain_text(kind, 40)}" for kind, count in shown[:_KINDS]]
        if rest := sum(count for _, count in shown[_KINDS:]):
            parts.append(f"{rest:,} others")
        texts.append(f"{', '.join(parts)} ({why})")
    return "; ".join(texts)


def note_skipped(world: Everyone, splits: Sequence[Dataset]) -> Note | None:
    """What to say at the end of rows that ranks could not read, each counted once; None: there are none, or this is
    not rank 0. Collective.
    """
    parts = world.gather([[sorted(rows.bad), [why for _, why in sorted(rows.bad.items())[:_NAMED]]] for rows in splits])
    if parts is None:
        return None
    rows = sum(len({row for part in parts for row in part[split][0]}) for split in range(len(splits)))
    if not rows:
        return None
    named = sorted({why for part in parts for some in part for why in some[1]})[:_NAMED]
    listed = "; ".join(plain_text(why, 200) for why in named)
    more = "; the logs of the ranks name all of them" if rows > len(named) else ""
    return Note("warning", f"{rows:,} row{'s' * (rows > 1)} cannot be read and counted for nothing: {listed}{more}")


def _kind(name: str) -> str:
    """What files are counted as: their suffix."""
    if name.endswith("/"):
        return "folder"
    file = name.rpartition("/")[2]
    return os.path.splitext(file)[1].lower() or (file if file.startswith(".") else "without suffix")


def _one_line(text: str) -> str:
    return plain_text(text, 10 * _LONGEST)
