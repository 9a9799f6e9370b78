"""Compiled loops over bags of ids: pooling their rows, and giving gradients back. Imported where numba is known to be
there.

`inverse` (n,): the row of each id, bag after bag; `lengths` (bags,): how many ids each has. Ids of the row `none` count
for nothing. All are deterministic and hold no lock.
"""

from __future__ import annotations

from numba import njit


@njit(cache=True, nogil=True)
def pool_sum(rows, inverse, lengths, none, out):
    """out[b] += the rows of bag b, in their order."""
    at = 0
    for b in range(len(lengths)):
        for i in range(at, at + lengths[b]):
            row = inverse[i]
            if row != none:
                for j in range(rows.shape[1]):
                    out[b, j] += rows[row, j]
        at += lengths[b]


@njit(cache=True, nogil=True)
def pool_max(rows, inverse, lengths, none, out, winners):
    """out[b]: the largest of each column, `winners`: the row that has it, the first of equal ones; 0 and -1 for a bag
    without ids. A number that is none is larger than all others.
    """
    at = 0
    for b in range(len(lengths)):
        winners[b] = -1
        for i in range(at, at + lengths[b]):
            row = inverse[i]
            if row != none:
                for j in range(rows.shape[1]):
                    value, best = rows[row, j], out[b, j]
                    if winners[b, j] < 0 or value > best or (value != value and best == best):
                        out[b, j], winners[b, j] = value, row
        at += lengths[b]


@njit(cache=True, nogil=True)
def count(inverse, lengths, none, counts):
    """counts[b]: how many ids of bag b count."""
    at = 0
    for b in range(len(lengths)):
        counts[b] = 0
        for i in range(at, at + lengths[b]):
            counts[b] += inverse[i] != none
        at += lengths[b]


@njit(cache=True, nogil=True)
def give_sum(gradients, inverse, lengths, sums):
    """sums[row] += the gradient (bags, width) of its bag, for each id in their order."""
    at = 0
    for b in range(len(lengths)):
        for i in range(at, at + lengths[b]):
            row = inverse[i]
            for j in range(gradients.shape[1]):
                sums[row, j] += gradients[b, j]
        at += lengths[b]


@njit(cache=True, nogil=True)
def give_max(gradients, winners, sums):
    """sums[winner] += the gradient of each column."""
    for b in range(gradients.shape[0]):
        for j in range(gradients.shape[1]):
            row = winners[b, j]
            if row >= 0:
                sums[row, j] += gradients[b, j]
