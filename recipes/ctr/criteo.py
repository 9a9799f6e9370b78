"""Lines of a Criteo log: label, 13 integers, 26 hexadecimal categories, tabs between; all but the label may be empty."""

from __future__ import annotations

from numba import njit

from dtf.recipes.ctr.hashing import MISSING, key_of
from dtf.recipes.ctr.lines import GOOD, HEX, INTEGER, LABEL, LONG, NEWLINE, SHORT, TAB, ZERO, find, first_look, hexadecimal, integer, why_not, without_return

INTEGERS, CATEGORIES = 13, 26


@njit(cache=True, nogil=True)
def parse(buffer, first, labels, numbers, keys, why):
    """Read len(labels) lines from position `first` on; returns how many there were.

    `numbers` (B, 13) int64, `keys` (B, 26) int64: hash(13 + column, value). `why` (B,): GOOD, or why a line is bad; its values are then not to be used.
    """
    for row in range(len(labels)):
        if first >= len(buffer):
            return row
        end = find(buffer, NEWLINE, first, len(buffer))
        why[row] = _line(buffer, first, without_return(buffer, first, end), labels, numbers, keys, row)
        first = end + 1
    return len(labels)


@njit(cache=True, nogil=True)
def _line(buffer, first, last, labels, numbers, keys, row):
    reason = first_look(buffer, first, last)
    if reason != GOOD:
        return reason
    column = 0
    while True:
        end = find(buffer, TAB, first, last)
        if column == 0:
            if end != first + 1 or not ZERO <= buffer[first] <= ZERO + 1:
                return why_not(buffer, first, end, LABEL)
            labels[row] = buffer[first] - ZERO
        elif column <= INTEGERS:
            number, good = integer(buffer, first, end)
            if not good:
                return why_not(buffer, first, end, INTEGER)
            numbers[row, column - 1] = number
        elif column <= INTEGERS + CATEGORIES:
            field = column - 1 - INTEGERS
            if first == end:
                keys[row, field] = MISSING
            else:
                value, good = hexadecimal(buffer, first, end)
                if not good:
                    return why_not(buffer, first, end, HEX)
                keys[row, field] = key_of(INTEGERS + field, value)
        else:
            return LONG
        column += 1
        if end >= last:
            return GOOD if column == 1 + INTEGERS + CATEGORIES else SHORT
        first = end + 1
