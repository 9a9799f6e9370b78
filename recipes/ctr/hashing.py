"""Keys of category values, and a table from key to number. Kernels on numbers and bytes; knows no file format."""

from __future__ import annotations

import numpy as np
from numba import njit

from dtf.sparse.id_kernels import mix

MISSING = -1
"""Key and table id of a field without a value."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


@njit(cache=True, nogil=True)
def key_of(field, value):
    """hash(field, value), 0 to 2**63 - 1. `value`: uint64."""
    return np.int64(mix(mix(value) + np.uint64(field + 1) * GOLDEN) >> np.uint64(1))


@njit(cache=True, nogil=True)
def value_of(buffer, first, last):
    """A number for the bytes [first, last): FNV-1a of 64 bits."""
    x = _FNV_START
    for i in range(first, last):
        x = (x ^ np.uint64(buffer[i])) * _FNV_PRIME
    return x


@njit(cache=True, nogil=True)
def values_of(buffer, bounds, out):
    """`value_of` of the bytes [bounds[i], bounds[i + 1]), for each i."""
    for i in range(len(out)):
        out[i] = value_of(buffer, bounds[i], bounds[i + 1])


@njit(cache=True, nogil=True)
def slot_of(table, key):
    """The index of `key` in an open-addressing table, or of the free slot where it belongs.

    The size of the table is a power of two; free slots hold MISSING.
    """
    mask = np.uint64(len(table) - 1)
    slot = mix(np.uint64(key)) & mask
    while table[slot] != key and table[slot] != MISSING:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@njit(cache=True, nogil=True)
def count_keys(table, counts, used, keys):
    """Add the occurrences of `keys` to a table with `used` slots taken.

    Returns the number of slots taken then, and of keys that were counted before the table was half full.
    """
    for i in range(len(keys)):
        if keys[i] == MISSING:
            continue
        slot = slot_of(table, keys[i])
        if table[slot] == MISSING:
            if 2 * (used + 1) > len(table):
                return used, i
            table[slot] = keys[i]
            used += 1
        counts[slot] += 1
    return used, len(keys)


@njit(cache=True, nogil=True)
def fill_table(table, numbers, keys, values):
    """Put keys and their numbers into an empty table at least twice as large."""
    for i in range(len(keys)):
        slot = slot_of(table, keys[i])
        table[slot] = keys[i]
        numbers[slot] = values[i]


@njit(cache=True, nogil=True)
def to_range(keys, size, ids):
    """Keys (B, F) as ids 0 to size - 1, fields together."""
    for i in range(keys.shape[0]):
        for f in range(keys.shape[1]):
            key = keys[i, f]
            ids[i, f] = MISSING if key == MISSING else key % size


@njit(cache=True, nogil=True)
def look_up(keys, table, numbers, rare, ids):
    """Keys (B, F) as their numbers; `rare[f]` for those that are not in the table."""
    for i in range(keys.shape[0]):
        for f in range(keys.shape[1]):
            key = keys[i, f]
            if key == MISSING:
                ids[i, f] = MISSING
            else:
                slot = slot_of(table, key)
                ids[i, f] = numbers[slot] if table[slot] == key else rare[f]
