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
