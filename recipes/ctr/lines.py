"""Kernels on lines and fields of a text buffer: where they end, what numbers they hold, and why a line is bad.

They never read beyond the bounds they get.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NONE = np.iinfo(np.int64).min
"""An integer column without a value."""

LONGEST = 1 << 16
"""Largest number of bytes of a line. Longer ones are bad."""

(GOOD, BLANK, TOO_LONG, MARK, NUL, NOT_TEXT, LABEL, SHORT, LONG, INTEGER, HEX, PAIR, VALUE, RANGE) = range(14)
REASONS = (
    "",
    "the line is blank",
    f"the line is longer than {LONGEST} bytes",
    "it begins with a byte order mark",
    "it holds a zero byte",
    "it holds bytes that are no UTF-8 text",
    "the label is neither 0 nor 1",
    "columns are missing",
    "there are too many columns",
    "an integer column holds something else",
    "a category is no hexadecimal number of up to 16 digits",
    "an `id:value` pair is malformed",
    "a value is not 1",
    "an id is not below recipe.data.table_size",
)
"""By the numbers above. They follow `FILE:LINE: ` in messages."""

_DIGITS = np.array(
    [int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 255 for byte in range(256)], np.uint8
)

NEWLINE, RETURN, TAB, COMMA, SPACE, COLON, MINUS, PLUS, ZERO = 10, 13, 9, 44, 32, 58, 45, 43, 48


@njit(cache=True, nogil=True)
def count_newlines(buffer):
    newlines = 0
    for i in range(len(buffer)):
        newlines += buffer[i] == NEWLINE
    return newlines


@njit(cache=True, nogil=True)
def after_newlines(buffer, count):
    """Position after the first `count` newlines; the end of the buffer when it has fewer."""
    i = 0
    while count > 0 and i < len(buffer):
        count -= buffer[i] == NEWLINE
        i += 1
    return i


@njit(cache=True, nogil=True)
def find(buffer, byte, first, last):
    """Position of the first such byte in [first, last), or `last`."""
    i = first
    while i < last and buffer[i] != byte:
        i += 1
    return i


@njit(cache=True, nogil=True)
def without_return(buffer, first, last):
    """The end of a line that may end with a carriage return."""
    return last - 1 if last > first and buffer[last - 1] == RETURN else last


@njit(cache=True, nogil=True)
def first_look(buffer, first, last):
    """Why the line [first, last) is bad in any format, or GOOD."""
    if first == last:
        return BLANK
    if last - first > LONGEST:
        return TOO_LONG
    if last - first >= 3 and buffer[first] == 0xEF and buffer[first + 1] == 0xBB and buffer[first + 2] == 0xBF:
        return MARK
    return GOOD


@njit(cache=True, nogil=True)
def why_not(buffer, first, last, reason):
    """A more precise reason for bytes [first, last) that are bad for `reason`: NUL, NOT_TEXT, else `reason` itself."""
    for i in range(first, last):
        if buffer[i] == 0:
            return NUL
    return reason if is_text(buffer, first, last) else NOT_TEXT


@njit(cache=True, nogil=True)
def is_text(buffer, first, last):
    """Whether bytes [first, last) are UTF-8 as RFC 3629 has it."""
    i = first
    while i < last:
        byte = buffer[i]
        i += 1
        if byte < 0x80:
            continue
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
        elif 0xF0 <= byte <= 0xF4:
            more = 3
        else:
            return False
        if i + more > last:
            return False
        low, high = 0x80, 0xBF  # of the second byte: no overlong forms, no surrogates, nothing beyond U+10FFFF
        if byte == 0xE0:
            low = 0xA0
        elif byte == 0xED:
            high = 0x9F
        elif byte == 0xF0:
            low = 0x90
        elif byte == 0xF4:
            high = 0x8F
        if not low <= buffer[i] <= high:
            return False
        for k in range(1, more):
            if not 0x80 <= buffer[i + k] <= 0xBF:
                return False
        i += more
    return True


@njit(cache=True, nogil=True)
def integer(buffer, first, last, end):
    """The integer that begins at `first`: its value, and the position of the byte `end`, or `last`, that ends it.

    It has an optional minus sign and 1 to 18 digits. The value is NONE where it is empty; NONE and position -1 where it
    is no integer.
    """
    if first == last or buffer[first] == end:
        return NONE, first
    negative = buffer[first] == MINUS
    start = i = first + negative
    value = 0
    while i < last:
        digit = np.int64(buffer[i]) - ZERO
        if not 0 <= digit <= 9:
            break
        value = value * 10 + digit
        i += 1
    if not 0 < i - start <= 18 or (i < last and buffer[i] != end):
        return NONE, -1
    return (-value if negative else value), i


@njit(cache=True, nogil=True)
def hexadecimal(buffer, first, last, end):
    """The number that begins at `first`, of 0 to 16 digits, as uint64; the position as in `integer`."""
    value, i = np.uint64(0), first
    while i < last:
        digit = _DIGITS[buffer[i]]
        if digit > 15:
            break
        value = (value << np.uint64(4)) | np.uint64(digit)
        i += 1
    if i - first > 16 or (i < last and buffer[i] != end):
        return value, -1
    return value, i
