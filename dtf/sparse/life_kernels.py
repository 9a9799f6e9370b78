"""Compiled loops over what is known of rows that have a life: shows, scores, shards. Imported where numba is known to
be there.

Nothing but + - * and comparisons in a fixed order, so that every machine decides alike. Shows and clicks are whole
numbers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dtf.sparse.id_kernels import mix

PROBES = 4
"""Cells of an id in the filter of its shard, one in each row of cells."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE, _S11, _S64 = np.uint64(1), np.uint64(11), np.uint64(64)
_MOST = 255


@njit(cache=True, nogil=True, inline="always")
def power(base, exponent):
    """base ** exponent of a whole exponent >= 0, by squaring: the same bits on every machine."""
    out, factor = 1.0, base
    while exponent > 0:
        if exponent & 1:
            out *= factor
        factor *= factor
        exponent >>= 1
    return out


@njit(cache=True, nogil=True)
def shards_of(ids, bits, out):
    """The virtual shard of each id: the first `bits` bits of its hash."""
    for i in range(len(ids)):
        out[i] = np.int64(mix(np.uint64(ids[i])) >> (_S64 - np.uint64(bits))) if bits > 0 else 0


@njit(cache=True, nogil=True)
def show(positions, seen, step, decay, scores, last):
    """Count what rows were shown and clicked in this step, `seen` (U, 2); -1 stands for no row."""
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0 and seen[i, 0] > 0:
            kept = np.float64(scores[at]) * power(decay, step - last[at])
            scores[at] = np.float32(kept + seen[i, 0] + seen[i, 1])
            last[at] = step


@njit(cache=True, nogil=True)
def decayed(scores, last, step, decay, out):
    """Scores as they are at `step`."""
    for i in range(len(scores)):
        out[i] = np.float64(scores[i]) * power(decay, step - last[i])


@njit(cache=True, nogil=True)
def lucky(key, ids, seen, step, probability, out):
    """Which ids one of their shows of this step admits, each with this probability: of (key, id, step) alone."""
    for i in range(len(ids)):
        h = mix(key ^ mix(np.uint64(ids[i]) * _GOLDEN + np.uint64(step)))
        uniform = np.float64(np.int64(h >> _S11)) * 2.0**-53
        out[i] = uniform >= power(1.0 - probability, np.int64(seen[i, 0]))


@njit(cache=True, nogil=True)
def count(cells, added, limits, ids, shards, seen, out):
    """Add the shows of ids without a row to the filters of their shards, and estimate how often each was shown.

    `cells` (shards, PROBES, 2**k) of one byte: a count-min sketch (Cormode & Muthukrishnan 2005), whose sums do not
    depend on order. Where a shard has counted `limits` shows, its counts are halved, so that old ones fade (Einziger,
    Friedman & Manes 2017, doi:10.1145/3149371, section 3.3). An estimate is never too small but for that.
    """
    mask = np.uint64(cells.shape[2] - 1)
    for estimate in range(2):
        for i in range(len(ids)):
            first = mix(np.uint64(ids[i]) * _GOLDEN)
            second = mix(first) | _ONE
            least = _MOST
            for row in range(PROBES):
                cell = (first + np.uint64(row) * second) & mask
                known = np.int64(cells[shards[i], row, cell])
                if estimate == 0:
                    cells[shards[i], row, cell] = np.uint8(min(_MOST, known + np.int64(seen[i, 0])))
                least = min(least, known)
            if estimate == 1:
                out[i] = least
            else:
                added[shards[i]] += np.int64(seen[i, 0])
    for i in range(len(ids)):
        shard = shards[i]
        while added[shard] >= limits[shard]:
            for row in range(PROBES):
                for cell in range(cells.shape[2]):
                    cells[shard, row, cell] >>= np.uint8(1)
            added[shard] >>= 1


@njit(cache=True, nogil=True)
def settle(shards, starts, counts, out):
    """Give each of some new rows the next free position of its shard."""
    for i in range(len(shards)):
        out[i] = starts[shards[i]] + counts[shards[i]]
        counts[shards[i]] += 1


@njit(cache=True, nogil=True)
def _before(a, b, scores, last, ids):
    if scores[a] != scores[b]:
        return scores[a] < scores[b]
    return last[a] < last[b] if last[a] != last[b] else ids[a] < ids[b]


@njit(cache=True, nogil=True)
def _select(order, size, count, scores, last, ids):
    """Bring the `count` lowest of order[:size] to its front (quickselect, Hoare 1961)."""
    low, high = 0, size - 1
    while low < high:
        pivot = order[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while _before(order[i], pivot, scores, last, ids):
                i += 1
            while _before(pivot, order[j], scores, last, ids):
                j -= 1
            if i <= j:
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if count - 1 <= j:
            high = j
        elif count - 1 >= i:
            low = i
        else:
            break


@njit(cache=True, nogil=True)
def lowest(shards, coming, starts, counts, limits, ids, scores, last, step, decay, out):
    """Positions of the rows that leave shards for `coming` new ones, shard by shard into `out`; returns how many."""
    found = 0
    for n in range(len(shards)):
        start, count, limit = starts[shards[n]], counts[shards[n]], limits[shards[n]]
        order, size = np.empty(count, np.int64), 0
        now = np.empty(count)
        for i in range(count):
            now[i] = np.float64(scores[start + i]) * power(decay, step - last[start + i])
            if last[start + i] < step:
                order[size] = i
                size += 1
        keep = max(0, min(7 * limit // 8, limit - coming[n]))
        leave = min(size, max(0, count - keep))
        if 0 < leave < size:
            _select(order, size, leave, now, last[start : start + count], ids[start : start + count])
        for i in range(leave):
            out[found] = start + order[i]
            found += 1
    return found


@njit(cache=True, nogil=True)
def close(positions, shards, starts, counts, were, are):
    """Fill the positions of rows that leave, those of a shard together, with its last rows that stay: where these
    `were` and where they `are`; returns how many. `shards`: of each position.
    """
    moved = first = 0
    while first < len(positions):
        shard, end = shards[first], first
        while end < len(positions) and shards[end] == shard:
            end += 1
        start, count = starts[shard], counts[shard]
        gone = np.zeros(count, np.bool_)
        for i in range(first, end):
            gone[positions[i] - start] = True
        keep, mover = count - (end - first), count
        for hole in range(keep):
            if gone[hole]:
                mover -= 1
                while gone[mover]:
                    mover -= 1
                were[moved], are[moved] = start + mover, start + hole
                moved += 1
        counts[shard] = keep
        first = end
    return moved
