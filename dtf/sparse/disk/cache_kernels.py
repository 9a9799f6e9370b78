"""Compiled loops over the rows of a cache: finding, inserting, evicting, and turning rows into records of bytes and
back. Imported where numba is known to be there.

A row of the cache has a position. `ids` (C,) int64, -1: the position is free; `slots` (n,) int32: position + 1 by hash
of the id, 0: empty, linear probing; `flags` (C,) uint8; `uses` (C,) uint8: looked up so often since the hand of the
clock came by; `next_use` (C,) int32: the step that is known to need it next.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dtf.sparse.disk.page_kernels import copy, hash_of, word
from dtf.sparse.id_kernels import AHEAD, nearest_bf16, prefetch

DIRTY, WRITING, ABSENT, STORED = 1, 2, 4, 8
"""Flags: differs from what is on disk; a sweep writes it now; stands for an id that has no row; is in a file, as it is
or as it was.
"""

NOT_CACHED, NO_ROW = -1, -2
NEVER, HELD = -1, -2
"""In `next_use`: not known; needed by the call that goes on."""
MOST_USES = 3

_S32, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)
_U16 = np.uint32(16)


@njit(cache=True, nogil=True)
def _home(key, count):
    # by the lower half: rows of one segment are alike in the upper one, and must not crowd
    return np.int64(((hash_of(key) & _LOWER) * np.uint64(count)) >> _S32)


@njit(cache=True, nogil=True)
def find(slots, ids, flags, wanted, with_absent, positions):
    """Position of each wanted id, NOT_CACHED where it has none, NO_ROW where it is ABSENT (`with_absent`: its position
    there too) or -1; returns how many are NOT_CACHED.
    """
    count, size, missing = len(wanted), len(slots), 0
    for i in range(count):
        home = _home(wanted[i], size)
        positions[i] = home
        prefetch(slots, home, 1)
    for i in range(count):
        if i + AHEAD < count:
            prefetch(ids, np.int64(slots[positions[i + AHEAD]]) - 1, 1)
        key, slot, position = wanted[i], positions[i], np.int64(NOT_CACHED)
        if key == -1:
            positions[i] = NO_ROW
            continue
        while slots[slot] != 0:
            at = np.int64(slots[slot]) - 1
            if ids[at] == key:
                position = NO_ROW if flags[at] & ABSENT and not with_absent else at
                break
            slot = slot + 1 if slot + 1 < size else 0
        missing += position == NOT_CACHED
        positions[i] = position
    return missing


@njit(cache=True, nogil=True)
def insert(slots, ids, wanted, positions):
    """Give ids that are not cached these free positions."""
    size = len(slots)
    for i in range(len(wanted)):
        slot = _home(wanted[i], size)
        while slots[slot] != 0:
            slot = slot + 1 if slot + 1 < size else 0
        slots[slot] = positions[i] + 1
        ids[positions[i]] = wanted[i]


@njit(cache=True, nogil=True)
def forget(slots, ids, position):
    """Free a position. Ids that were pushed on by its id move back, so that no search ends before them."""
    size = len(slots)
    hole = _home(ids[position], size)
    while slots[hole] != position + 1:
        hole = hole + 1 if hole + 1 < size else 0
    ids[position] = -1
    slot = hole
    while True:
        slot = slot + 1 if slot + 1 < size else 0
        if slots[slot] == 0:
            break
        home = _home(ids[slots[slot] - 1], size)
        stays = hole < home <= slot if hole <= slot else (home > hole or home <= slot)
        if not stays:
            slots[hole] = slots[slot]
            hole = slot
    slots[hole] = 0


@njit(cache=True, nogil=True)
def evict(slots, ids, flags, uses, next_use, first, last, top, hand, freed, forgotten):
    """Free clean positions below `top` as a clock does, into `freed`, and their ids into `forgotten`, until it is full
    or a whole turn finds none that may go; returns how many, and the hand. Rows that are HELD, or whose next use is in
    [first, last], stay.
    """
    count = idle = 0
    while count < len(freed) and idle < top:
        if hand >= top:
            hand = 0
        at = hand
        hand += 1
        idle += 1
        if ids[at] == -1 or next_use[at] == HELD or first <= next_use[at] <= last:
            continue
        clean = not flags[at] & (DIRTY | WRITING)
        if uses[at]:
            uses[at] -= 1
        elif clean:
            forgotten[count], freed[count] = ids[at], at
            forget(slots, ids, at)
            flags[at] = 0
            count += 1
        if clean:
            idle = 0
    return count, hand


@njit(cache=True, nogil=True)
def touch(positions, uses, next_use, now):
    """Rows of `positions` are used at step `now`."""
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0:
            uses[at] = min(uses[at] + 1, MOST_USES)
            next_use[at] = now


@njit(cache=True, nogil=True)
def await_use(positions, next_use, now, step):
    """Rows of `positions` will be used at `step`, or sooner where that is known."""
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0 and not now <= next_use[at] < step:
            next_use[at] = step


@njit(cache=True, nogil=True)
def set_dirty(positions, flags, ids, low, shift, lists, counts, next_at):
    """Put those that are not DIRTY into the list of their hash; returns how many. `lists` (n,): the first position + 1
    of each, 0: none; `next_at` (C,): the next one. List k has hashes from low + (k << shift) on.
    """
    fresh = 0
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0 and not flags[at] & DIRTY:
            flags[at] |= DIRTY
            bucket = np.int64((hash_of(ids[at]) - low) >> shift)
            next_at[at] = lists[bucket]
            lists[bucket] = at + 1
            counts[bucket] += 1
            fresh += 1
    return fresh


@njit(cache=True, nogil=True)
def set_free(positions, free, next_at):
    """Put them into the only list of `free` (1,)."""
    for i in range(len(positions)):
        next_at[positions[i]] = free[0]
        free[0] = positions[i] + 1


@njit(cache=True, nogil=True)
def walk(lists, next_at, out):
    """As many positions of `lists` as there is room for, which are taken from them. One of each in turn, so that memory
    is asked for many at a time. There must be enough.
    """
    count = 0
    while count < len(out):
        for i in range(len(lists)):
            if lists[i] and count < len(out):
                at = lists[i] - 1
                out[count] = at
                count += 1
                lists[i] = next_at[at]


@njit(cache=True, nogil=True)
def begin_writing(positions, flags, removed):
    """A sweep takes these rows: not DIRTY but WRITING, and `removed` 1 for those that are ABSENT."""
    for i in range(len(positions)):
        at = positions[i]
        removed[i] = flags[at] & ABSENT != 0
        flags[at] = flags[at] & ~np.uint8(DIRTY) | np.uint8(WRITING)


@njit(cache=True, nogil=True)
def end_writing(positions, flags, removed, written):
    """The sweep is over; `written`: its rows are in files now, but for those that were `removed`."""
    for i in range(len(positions)):
        at = positions[i]
        flags[at] &= ~np.uint8(WRITING)
        if written:
            flags[at] = flags[at] & ~np.uint8(STORED) if removed[i] else flags[at] | np.uint8(STORED)


@njit(cache=True, nogil=True)
def encode(ids, rows, words, extra, positions, narrow, out):
    """Records (n, size) of rows: id, numbers, extra. `rows` (C, bytes) and `words` (C, uint32) are the same memory; the
    first `narrow` numbers are kept as bfloat16.
    """
    from_rows, flat, from_extra = rows.reshape(-1), out.reshape(-1), extra.reshape(-1)
    size, row_bytes, extra_bytes = out.shape[1], rows.shape[1], extra.shape[1]
    key = np.empty(1, np.int64)
    key_bytes = key.view(np.uint8)
    for i in range(len(positions)):
        at, place = positions[i], i * size
        key[0] = ids[at]
        copy(flat, place, key_bytes, 0, 8)
        place += 8
        for j in range(narrow):
            half = nearest_bf16(words[at, j]) >> _U16
            flat[place] = half & np.uint32(255)
            flat[place + 1] = half >> np.uint32(8)
            place += 2
        copy(flat, place, from_rows, at * row_bytes + 4 * narrow, row_bytes - 4 * narrow)
        place += row_bytes - 4 * narrow
        copy(flat, place, from_extra, at * extra_bytes, extra_bytes)


@njit(cache=True, nogil=True)
def decode(records, chosen, positions, rows, words, extra, narrow):
    """The inverse of `encode` for records `chosen` (n,), into rows at `positions` (n,)."""
    to_rows, flat, to_extra = rows.reshape(-1), records.reshape(-1), extra.reshape(-1)
    size, row_bytes, extra_bytes = records.shape[1], rows.shape[1], extra.shape[1]
    for i in range(len(positions)):
        at, place = positions[i], chosen[i] * size + 8
        for j in range(narrow):
            words[at, j] = (np.uint32(flat[place]) | np.uint32(flat[place + 1]) << np.uint32(8)) << _U16
            place += 2
        copy(to_rows, at * row_bytes + 4 * narrow, flat, place, row_bytes - 4 * narrow)
        place += row_bytes - 4 * narrow
        copy(to_extra, at * extra_bytes, flat, place, extra_bytes)


@njit(cache=True, nogil=True)
def ids_of(records, out):
    """The ids of records (n, size)."""
    flat, size = records.reshape(-1), records.shape[1]
    for i in range(len(records)):
        out[i] = word(flat, i * size)
