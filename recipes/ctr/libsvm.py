"""Lines of libsvm and libfm files in which each row has the same fields: a label 1, 0 or -1, then an `id:1` for each
field, spaces between.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dtf.recipes.ctr.hashing import key_of
from dtf.recipes.ctr.lines import (
    COLON,
    GOOD,
    LABEL,
    LONG,
    MINUS,
    NEWLINE,
    PAIR,
    PLUS,
    RANGE,
    SHORT,
    SPACE,
    VALUE,
    ZERO,
    find,
    first_look,
    integer,
    why_not,
    without_return,
)


@njit(cache=True, nogil=True)
def parse(buffer, first, labels, numbers, keys, why, lengths, values, labelled):
    """As `criteo.parse`; `numbers` (B, 0), `keys` (B, fields): the ids as they are. Where `lengths` is (B, 1), further
    pairs of a line are its values, as many as it says, in `values` one line after the other. Returns how many lines and
    values there were.
    """
    count = 0
    for row in range(len(labels)):
        if first >= len(buffer):
            return row, count
        end = find(buffer, NEWLINE, first, len(buffer))
        last = without_return(buffer, first, end)
        why[row], more = _line(buffer, first, last, labels, keys, lengths.shape[1] > 0, values[count:], row, labelled)
        if lengths.shape[1] > 0:
            lengths[row, 0] = more
            count += more
        first = end + 1
    return len(labels), count


@njit(cache=True, nogil=True)
def finish(keys, why, limit):
    """Ids from `limit` on make a line bad; where it is 0, hash(field, id) replaces the ids."""
    for row in range(len(why)):
        if why[row] == GOOD:
            for field in range(keys.shape[1]):
                if limit == 0:
                    keys[row, field] = key_of(field, np.uint64(keys[row, field]))
                elif keys[row, field] >= limit:
                    why[row] = RANGE


@njit(cache=True, nogil=True)
def finish_bags(values, lengths, why, field, limit):
    """As `finish`, of the values of a field after the others."""
    at = 0
    for row in range(len(why)):
        for i in range(at, at + lengths[row, 0]):
            if limit == 0:
                values[i] = key_of(field, np.uint64(values[i]))
            elif values[i] >= limit and why[row] == GOOD:
                why[row] = RANGE
        at += lengths[row, 0]


@njit(cache=True, nogil=True)
def _line(buffer, first, last, labels, keys, bagged, values, row, labelled):
    """Why the line is bad, or GOOD; and how many values it has beyond those of `keys`."""
    reason = first_look(buffer, first, last)
    if reason != GOOD:
        return reason, 0
    labels[row], end = 0, first - 1
    if labelled:
        end = find(buffer, SPACE, first, last)
        signed = end == first + 2 and (buffer[first] == MINUS or buffer[first] == PLUS) and buffer[end - 1] == ZERO + 1
        if not (signed or (end == first + 1 and ZERO <= buffer[first] <= ZERO + 1)):
            return why_not(buffer, first, end, LABEL), 0
        labels[row] = buffer[end - 1] - ZERO if buffer[first] != MINUS else 0
    field, more = 0, 0
    while end < last:
        first = end + 1
        end = find(buffer, SPACE, first, last)
        if first == end:  # one space more, or at the end
            continue
        colon = find(buffer, COLON, first, end)
        number, stop = integer(buffer, first, colon, COLON)
        if stop < 0 or number < 0 or colon + 1 >= end:
            return why_not(buffer, first, end, PAIR), 0
        if not _is_one(buffer, colon + 1, end):
            return why_not(buffer, first, end, VALUE), 0
        if field < keys.shape[1]:
            keys[row, field] = number
            field += 1
        elif bagged:
            values[more] = number
            more += 1
        else:
            return LONG, 0
    return (GOOD, more) if field == keys.shape[1] else (SHORT, 0)


@njit(cache=True, nogil=True)
def _is_one(buffer, first, last):
    """Whether [first, last) is 1, 1.0, 1.00 and so on."""
    good = buffer[first] == ZERO + 1 and last != first + 2
    for i in range(first + 1, last):
        good = good and buffer[i] == (46 if i == first + 1 else ZERO)
    return good


def has_label(line: bytes) -> bool:
    """The first word of a line without a label is a pair."""
    return b":" not in line.split(b" ", 1)[0]
