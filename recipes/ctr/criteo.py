"""Lines of a Criteo log: label, 13 integers, 26 hexadecimal categories, tabs between; all but the label may be
empty.
"""

from __future__ import annotations

from numba import njit

from dtf.recipes.ctr.columns import CRITEO
from dtf.recipes.ctr.hashing import MISSING, key_of
from dtf.recipes.ctr.lines import (
    GOOD,
    HEX,
    INTEGER,
    LABEL,
    LONG,
    NEWLINE,
    SHORT,
    TAB,
    ZERO,
    find,
    first_look,
    hexadecimal,
    integer,
    why_not,
    without_return,
)

INTEGERS, CATEGORIES = 13, len(CRITEO)


@njit(cache=True, nogil=True)
def parse(buffer, first, labels, numbers, keys, why, labelled):
    """Read len(labels) lines from position `first` on; returns how many there were.

    `numbers` (B, 13) int64, `keys` (B, 26) int64: hash(13 + column, value). `why` (B,): GOOD, or why a line is bad; its
    values are then not to be used. `labelled=False`: lines have no label, and what follows it begins them; labels are
    0.
    """
    for row in range(len(labels)):
        if first >= len(buffer):
            return row
        end = find(buffer, NEWLINE, first, len(buffer))
        why[row] = _line(buffer, first, without_return(buffer, first, end), labels, numbers, keys, row, labelled)
        first = end + 1
    return len(labels)


@njit(cache=True, nogil=True)
def _line(buffer, first, last, labels, numbers, keys, row, labelled):
    reason = first_look(buffer, first, last)
    if reason != GOOD:
        return reason
    labels[row], at = 0, first - 1  # the tab before the next column, or the end
    if labelled:
        if not ZERO <= buffer[first] <= ZERO + 1 or (first + 1 < last and buffer[first + 1] != TAB):
            return why_not(buffer, first, find(buffer, TAB, first, last), LABEL)
        labels[row], at = buffer[first] - ZERO, first + 1
    for column in range(INTEGERS):
        if at == last:
            return SHORT
        number, end = integer(buffer, at + 1, last, TAB)
        if end < 0:
            return why_not(buffer, at + 1, find(buffer, TAB, at + 1, last), INTEGER)
        numbers[row, column] = number
        at = end
    for column in range(CATEGORIES):
        if at == last:
            return SHORT
        value, end = hexadecimal(buffer, at + 1, last, TAB)
        if end < 0:
            return why_not(buffer, at + 1, find(buffer, TAB, at + 1, last), HEX)
        keys[row, column] = MISSING if end == at + 1 else key_of(INTEGERS + column, value)
        at = end
    return GOOD if at == last else LONG


def has_label(line: bytes) -> bool:
    """By the number of its columns."""
    return line.count(b"\t") + 1 != INTEGERS + CATEGORIES


COLUMNS = (*(f"I{number}" for number in range(1, INTEGERS + 1)), *CRITEO)
"""Names, as the log is usually described; the label is in front of them."""
