"""Compiled loops over the ids and rows of sparse tables: hashing, drawing, finding, summing. Imported where numba is
known to be there.

All are deterministic and hold no lock, so that threads may each run one. Arrays are contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

AHEAD = 32
"""Ids between asking memory for a place and reading it: about as many as are on their way at once."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_ONE = np.uint64(1)
_NAN, _QUIET, _HALF, _ONE32 = np.uint32(0x7F800000), np.uint32(0x400000), np.uint32(0x7FFF), np.uint32(1)
_SIGNLESS, _U16, _HIGH = np.uint32(0x7FFFFFFF), np.uint32(16), np.uint32(0xFFFF0000)
_LN2 = 0.6931471805599453
_SQRT2 = 1.4142135623730951
_HALF_PI = 1.5707963267948966


@intrinsic
def _prefetch(typingctx, array, start, count):
    """Ask for the cache lines of `array[start : start + count]`, of one axis, without waiting; a place outside of it
    does no harm.
    """
    line = 64 // (array.dtype.bitwidth // 8)

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        flags = [ir.IntType(32)(number) for number in (0, 3, 1)]  # to read, keep in all caches, data
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, *(flag.type for flag in flags)])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        stop = builder.add(arguments[1], arguments[2])
        with cgutils.for_range_slice(builder, arguments[1], stop, stop.type(line)) as (index, _):
            builder.call(call, [builder.bitcast(builder.gep(data, [index]), pointer), *flags])
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), codegen


prefetch: Any = _prefetch  # called without the context


@njit(cache=True, nogil=True, inline="always")
def mix(x):
    """The output function of SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2714064.2660195)."""
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return x ^ (x >> _S31)


@njit(cache=True, nogil=True)
def unique(ids, slots, found, inverse):
    """Distinct ids (n,) in order of first appearance into `found`, their places in it into `inverse`; returns how many.

    `slots`: zeros, 2**k > n.
    """
    mask = np.uint64(len(slots) - 1)
    count = 0
    for i in range(len(ids)):
        key = ids[i]
        slot = mix(np.uint64(key) * _GOLDEN) & mask
        while True:
            at = slots[slot]
            if at == 0:
                found[count] = key
                count += 1
                slots[slot] = count
                inverse[i] = count - 1
                break
            if found[at - 1] == key:
                inverse[i] = at - 1
                break
            slot = (slot + _ONE) & mask
    return count


@njit(cache=True, nogil=True)
def gather(rows, inverse, out):
    """out[i] = rows[inverse[i]]."""
    for i in range(len(inverse)):
        row = inverse[i]
        for j in range(rows.shape[1]):
            out[i, j] = rows[row, j]


@njit(cache=True, nogil=True)
def segment_sum(values, inverse, out):
    """out[inverse[i]] += values[i], in the order of i."""
    for i in range(len(inverse)):
        row = inverse[i]
        for j in range(values.shape[1]):
            out[row, j] += values[i, j]


@njit(cache=True, nogil=True)
def find(slots, ids, positions):
    """Row of each id, -1 where it has none; returns how many have none.

    `slots` (2**k, 2): id, row + 1; 0 in the second: empty. Linear probing.
    """
    flat = slots.reshape(-1)
    mask = np.uint64(len(slots) - 1)
    count, missing = len(ids), 0
    for i in range(count):
        slot = np.int64(mix(np.uint64(ids[i]) * _GOLDEN) & mask)
        positions[i] = slot
        prefetch(flat, 2 * slot, 1)
    for i in range(count):
        key, position = ids[i], np.int64(-1)
        if key != -1:
            slot = np.uint64(positions[i])
            while slots[slot, 1] != 0:
                if slots[slot, 0] == key:
                    position = slots[slot, 1] - 1
                    break
                slot = (slot + _ONE) & mask
            missing += position < 0
        positions[i] = position
    return missing


@njit(cache=True, nogil=True)
def find_direct(slots, ids, positions):
    """`find` where slot = id: `slots` (size,) row + 1, 0: no row."""
    count, missing = len(ids), 0
    for i in range(count):
        if i + AHEAD < count and ids[i + AHEAD] != -1:
            prefetch(slots, ids[i + AHEAD], 1)
        position = np.int64(-1)
        if ids[i] != -1:
            position = np.int64(slots[ids[i]]) - 1
            missing += position < 0
        positions[i] = position
    return missing


@njit(cache=True, nogil=True)
def insert(slots, ids, positions):
    """Give ids that have no row these."""
    mask = np.uint64(len(slots) - 1)
    for i in range(len(ids)):
        slot = mix(np.uint64(ids[i]) * _GOLDEN) & mask
        while slots[slot, 1] != 0:
            slot = (slot + _ONE) & mask
        slots[slot, 0] = ids[i]
        slots[slot, 1] = positions[i] + 1


@njit(cache=True, nogil=True)
def move(slots, ids, positions):
    """Give ids that have a row another one."""
    mask = np.uint64(len(slots) - 1)
    for i in range(len(ids)):
        slot = mix(np.uint64(ids[i]) * _GOLDEN) & mask
        while slots[slot, 1] == 0 or slots[slot, 0] != ids[i]:
            slot = (slot + _ONE) & mask
        slots[slot, 1] = positions[i] + 1


@njit(cache=True, nogil=True)
def remove(slots, ids):
    """Take the rows of ids that have one away. Those behind them move up, so that no slot is left that is neither
    empty nor used (Knuth, The Art of Computer Programming, vol. 3, section 6.4, algorithm R).
    """
    mask = np.uint64(len(slots) - 1)
    for i in range(len(ids)):
        hole = mix(np.uint64(ids[i]) * _GOLDEN) & mask
        while slots[hole, 1] == 0 or slots[hole, 0] != ids[i]:
            hole = (hole + _ONE) & mask
        slot = hole
        while True:
            slot = (slot + _ONE) & mask
            if slots[slot, 1] == 0:
                break
            home = mix(np.uint64(slots[slot, 0]) * _GOLDEN) & mask
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                slots[hole, 0] = slots[slot, 0]
                slots[hole, 1] = slots[slot, 1]
                hole = slot
        slots[hole, 1] = 0


@njit(cache=True, nogil=True)
def squares(values):
    """Sum of the squares of (n,) in float64, in an order that is the same on every machine."""
    lanes = np.zeros(8)
    whole = len(values) // 8 * 8
    for i in range(0, whole, 8):
        for j in range(8):
            lanes[j] += np.float64(values[i + j]) * np.float64(values[i + j])
    total = 0.0
    for j in range(8):
        total += lanes[j]
    for i in range(whole, len(values)):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@njit(cache=True, nogil=True)
def rehash(old, new):
    """Move all ids into larger slots."""
    mask = np.uint64(len(new) - 1)
    for i in range(len(old)):
        if old[i, 1] != 0:
            slot = mix(np.uint64(old[i, 0]) * _GOLDEN) & mask
            while new[slot, 1] != 0:
                slot = (slot + _ONE) & mask
            new[slot, 0] = old[i, 0]
            new[slot, 1] = old[i, 1]


@njit(cache=True, nogil=True)
def read(records, positions, out):
    """The first columns of records; zeros where a position is -1."""
    flat = records.reshape(-1)
    count, width, stride = len(positions), out.shape[1], records.shape[1]
    for i in range(count):
        if i + AHEAD < count:
            prefetch(flat, positions[i + AHEAD] * stride, width)
        if positions[i] >= 0:
            start = positions[i] * stride
            for j in range(width):
                out[i, j] = flat[start + j]
        else:
            for j in range(width):
                out[i, j] = 0


@njit(cache=True, nogil=True, error_model="numpy")
def draw(key, ids, scale, out):
    """Rows (n, width), normal with standard deviation `scale`, each a function of `key` and its id alone.

    Box & Muller 1958 on SplitMix64, in float64, with series of our own for logarithm, sine and cosine: nothing but + -
    * / and roots, which every machine rounds alike, so that all draw the same bits.
    """
    width = out.shape[1]
    half = (width + 1) // 2
    angle, power = np.empty(half), np.empty(half)
    uniform, mantissa = np.empty(half), np.empty(half)
    bits, fraction = uniform.view(np.int64), mantissa.view(np.int64)
    for i in range(len(ids)):
        start = mix(np.uint64(ids[i]) * _GOLDEN + key)
        for j in range(half):
            h = mix(start + np.uint64(2 * j + 1) * _GOLDEN)
            uniform[j] = np.float64(np.int64(h >> _S11) + 1) * 2.0**-53  # in (0, 1]
            h = mix(start + np.uint64(2 * j + 2) * _GOLDEN)
            angle[j] = np.float64(np.int64(h >> _S11)) * 2.0**-51  # in quarter turns: [0, 4)
        for j in range(half):
            power[j] = np.float64((bits[j] >> 52) - 1023)
            fraction[j] = (bits[j] & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000  # mantissa in [1, 2)
        for j in range(half):
            m, e = mantissa[j], power[j]
            high = m > _SQRT2
            m, e = (m * 0.5 if high else m), (e + 1.0 if high else e)
            s = (m - 1.0) / (m + 1.0)
            q = s * s
            series = 1.0 / 17.0
            for k in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
                series = series * q + 1.0 / k
            radius = scale * np.sqrt(-2.0 * (e * _LN2 + 2.0 * s * series))
            quarter = np.floor(angle[j])
            a = (angle[j] - quarter - 0.5) * _HALF_PI  # the half turn of an eighth does not change the distribution
            q = a * a
            sine = cosine = 1.0
            for k in (14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0):
                sine = 1.0 - sine * q / (k * (k + 1.0))
                cosine = 1.0 - cosine * q / (k * (k - 1.0))
            sine = sine * a
            odd = quarter == 1.0 or quarter == 3.0
            first, second = (sine if odd else cosine), (cosine if odd else sine)
            first = -first if quarter == 1.0 or quarter == 2.0 else first
            second = -second if quarter >= 2.0 else second
            uniform[j], angle[j] = radius * first, radius * second
        for j in range(half):
            out[i, 2 * j] = uniform[j]
            if 2 * j + 1 < width:
                out[i, 2 * j + 1] = angle[j]


@njit(cache=True, nogil=True)
def nearest_bf16(bits):
    """bfloat16 in the upper half of float32 `bits`, rounded to nearest, ties to even; NaN stays NaN."""
    if bits & _SIGNLESS > _NAN:
        return (bits | _QUIET) & _HIGH
    return (bits + _HALF + ((bits >> _U16) & _ONE32)) & _HIGH


@njit(cache=True, nogil=True)
def round_rows(words, width, positions):
    """Round the first `width` numbers of rows of float32 `words` to bfloat16."""
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0:
            for j in range(width):
                words[at, j] = nearest_bf16(words[at, j])


@njit(cache=True, nogil=True)
def flagged(positions, flags, found):
    """Slots whose position, kept as position + 1 (0: none), has a flag, into `found`; returns how many."""
    count = 0
    for i in range(len(positions)):
        at = positions[i]
        if at > 0 and flags[at - 1]:
            found[count] = i
            count += 1
    return count
