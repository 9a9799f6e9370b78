"""Lines of an Avazu log: id, click, hour and 21 categories, commas between, under a header.

Of the hour the hour of the day is kept, the id is left out.
"""

from __future__ import annotations

from numba import njit

from dtf.recipes.ctr.columns import AVAZU
from dtf.recipes.ctr.hashing import MISSING, key_of, value_of
from dtf.recipes.ctr.lines import (
    COMMA,
    GOOD,
    LABEL,
    LONG,
    NEWLINE,
    NOT_TEXT,
    NUL,
    SHORT,
    ZERO,
    find,
    first_look,
    is_text,
    without_return,
)

CATEGORIES = len(AVAZU)
"""`hour` and what follows it."""

HEADER = ",".join(("id", "click", *AVAZU))
"""The first line of each file."""

UNLABELLED = HEADER.replace("click,", "")
"""The same where there are no labels."""


@njit(cache=True, nogil=True)
def parse(buffer, first, labels, numbers, keys, why, labelled):
    """As `criteo.parse`; `numbers` (B, 0), `keys` (B, 22): hash(column, bytes)."""
    for row in range(len(labels)):
        if first >= len(buffer):
            return row
        end = find(buffer, NEWLINE, first, len(buffer))
        why[row] = _line(buffer, first, without_return(buffer, first, end), labels, keys, row, labelled)
        first = end + 1
    return len(labels)


@njit(cache=True, nogil=True)
def _line(buffer, first, last, labels, keys, row, labelled):
    reason = first_look(buffer, first, last)
    if reason != GOOD:
        return reason
    if find(buffer, 0, first, last) < last:
        return NUL
    if not is_text(buffer, first, last):
        return NOT_TEXT
    labels[row], column = 0, 0
    while True:
        end = find(buffer, COMMA, first, last)
        if column == 1:
            if end != first + 1 or not ZERO <= buffer[first] <= ZERO + 1:
                return LABEL
            labels[row] = buffer[first] - ZERO
        elif 1 < column <= 1 + CATEGORIES:
            start = max(first, end - 2) if column == 2 else first  # 14102100: of the hour its last two digits
            keys[row, column - 2] = MISSING if first == end else key_of(column - 2, value_of(buffer, start, end))
        elif column:
            return LONG
        column += 1 if labelled or column else 2  # over the label
        if end >= last:
            return GOOD if column == 2 + CATEGORIES else SHORT
        first = end + 1


def has_label(line: bytes) -> bool:
    return line != UNLABELLED.encode()
