"""Compiled loops over pages of records on disk: finding, reading, checking, merging. Imported where numba is known to
be there.

All hold no lock, so that threads may each run one. Records are bytes: an id (int64), then the rest. A page holds
records by ascending hash of their ids, and its checksum in its last 8 bytes. The hash is one to one: ids never collide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dtf.sparse.id_kernels import mix

# of libc: size_t and off_t have 64 bits, a pointer is passed as a number
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uint64, types.uint64, types.int64))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0xD6E8FEB86659FD93)
_S32, _ONE = np.uint64(32), np.uint64(1)
_LANES = 8
_FILTER_TAPS = 4
FILTER_BITS = 12
"""Of a filter, for each hash: about 1 % of the others pass."""
WHOLE, DAMAGED, UNREADABLE = 0, 1, 2
"""How reading a page ends."""


@intrinsic
def _word(typingctx, array, start):
    """The int64 in bytes [start, start + 8) of an array of one axis, wherever they lie."""

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [arguments[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.int64(array, types.int64), codegen


@intrinsic
def _copy(typingctx, target, to, source, start, count):
    """target[to : to + count] = source[start : start + count], bytes of arrays of one axis that do not overlap."""

    def codegen(context, builder, signature, arguments):
        places = []
        for index in (0, 2):
            data = context.make_array(signature.args[index])(context, builder, arguments[index]).data
            places.append(builder.gep(data, [arguments[index + 1]]))
        cgutils.raw_memcpy(builder, places[0], places[1], arguments[4], 1)
        return context.get_dummy_value()

    return types.none(target, types.int64, source, types.int64, types.int64), codegen


@intrinsic
def _peek(typingctx, address):
    """The uint64 at an address, which its caller keeps alive."""

    def codegen(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

    return types.uint64(types.int64), codegen


word: Any = _word  # called without the context
copy: Any = _copy
peek: Any = _peek


@njit(cache=True, nogil=True)
def hash_of(key):
    return mix(np.uint64(key))


@njit(cache=True, nogil=True)
def hashes(ids, out):
    """The hash of each id, uint64."""
    for i in range(len(ids)):
        out[i] = hash_of(ids[i])


@njit(cache=True, nogil=True)
def checksum(words, first, count, seed):
    """Of `words[first : first + count]`, uint64. Any change of one word changes it for sure, others almost surely."""
    lanes = np.empty(_LANES, np.uint64)
    for j in range(_LANES):
        lanes[j] = seed + np.uint64(j) * _GOLDEN
    whole = count // _LANES * _LANES
    for i in range(0, whole, _LANES):
        for j in range(_LANES):
            lane = (lanes[j] ^ words[first + i + j]) * _PRIME
            lanes[j] = lane ^ (lane >> _S32)
    for j in range(count - whole):
        lane = (lanes[j] ^ words[first + whole + j]) * _PRIME
        lanes[j] = lane ^ (lane >> _S32)
    total = np.uint64(count)
    for j in range(_LANES):
        total = mix(total ^ lanes[j]) * _PRIME
    return total


@njit(cache=True, nogil=True)
def _in_filter(hashed, words):
    """Where a hash is in a filter of so many words: which word, and its bits there."""
    mixed, mask = hashed * _PRIME, np.uint64(0)
    for shift in range(0, 6 * _FILTER_TAPS, 6):
        mask |= _ONE << ((mixed >> np.uint64(shift)) & np.uint64(63))
    return np.int64(((mixed >> _S32) * np.uint64(words)) >> _S32), mask


@njit(cache=True, nogil=True)
def fill_filter(hashed, words):
    """Put hashes into a filter, zeros (n,) uint64, that says of most others that it has not got them: a Bloom filter in
    which all bits of a hash are in one word (Putze, Sanders & Singler 2007, doi:10.1145/1498698.1594230).
    """
    for i in range(len(hashed)):
        place, mask = _in_filter(hashed[i], len(words))
        words[place] |= mask


@njit(cache=True, nogil=True)
def _may_hold(table, number, hashed):
    words = table[number, 6]
    if words == 0:
        return table[number, 2] > 0
    place, mask = _in_filter(hashed, words)
    return peek(table[number, 5] + 8 * place) & mask == mask


@njit(cache=True, nogil=True)
def plan(table, lows, starts, hashed, tried, owner, jobs):
    """Choose for each of ascending `hashed` (n,) the newest file that may hold it and is older than the one it `tried`:
    its number into `owner` (-1 before, and where there is none), and pages to read into `jobs`: rows (file, page,
    begin, end), to look there for the hashes of this owner in [begin, end). Returns how many.

    `table` (files, 7) int64: descriptor, seed of checksums, records; address of the first hash of each page, their
    number; address of the filter, its words (0: it may hold any). Range k has hashes from lows[k] on, and files
    starts[k] to starts[k + 1], newest first.
    """
    count = begin = part = 0
    while begin < len(hashed):
        while part + 1 < len(lows) and lows[part + 1] <= hashed[begin]:
            part += 1
        end = begin + 1
        while end < len(hashed) and (part + 1 == len(lows) or hashed[end] < lows[part + 1]):
            end += 1
        for number in range(starts[part], starts[part + 1]):
            claimed = 0
            for i in range(begin, end):
                if owner[i] < 0 and number > tried[i] and _may_hold(table, number, hashed[i]):
                    owner[i] = number
                    claimed += 1
            if claimed:
                count = _pages(table[number, 3], table[number, 4], hashed, begin, end, number, owner, jobs, count)
        begin = end
    return count


@njit(cache=True, nogil=True)
def _pages(firsts, pages, hashed, begin, end, number, owner, jobs, count):
    """The jobs of one file; see `plan`."""
    low, last = 0, np.int64(-1)
    for i in range(begin, end):
        if owner[i] != number:
            continue
        high = pages  # the page is in [low, high)
        while high - low > 1:
            middle = (low + high) >> 1
            if peek(firsts + 8 * middle) <= hashed[i]:
                low = middle
            else:
                high = middle
        if low != last:
            jobs[count, 0], jobs[count, 1], jobs[count, 2] = number, low, i
            last = low
            count += 1
        jobs[count - 1, 3] = i + 1
    return count


@njit(cache=True, nogil=True)
def fill(file, address, count, offset):
    """Read `count` bytes at `offset` to `address`; returns how many came."""
    done = 0
    while done < count:
        got = _pread(np.int32(file), np.uint64(address + done), np.uint64(count - done), np.int64(offset + done))
        if got <= 0:
            break
        done += got
    return done


@njit(cache=True, nogil=True)
def read_jobs(jobs, first, step, table, start, ids, hashed, owner, order, size, buffer, out, found):
    """Read the pages of jobs first, first + step, ... (see `plan`) of files whose pages begin at `start`, and copy
    records of `ids` (sorted as `hashed`) to `out[order]` (n, size), with `found[order]` 1. Returns how it ended, and
    the job.

    `buffer` uint64: room for one page, aligned as the device needs it.
    """
    page_words = len(buffer)
    page_bytes = page_words * 8
    held, flat = buffer.view(np.uint8), out.reshape(-1)
    per_page = (page_bytes - 8) // size
    for job in range(first, len(jobs), step):
        number, page = jobs[job, 0], jobs[job, 1]
        if fill(table[number, 0], buffer.ctypes.data, page_bytes, start + page * page_bytes) < page_bytes:
            return UNREADABLE, job
        seed = np.uint64(table[number, 1]) + np.uint64(page)
        if checksum(buffer, 0, page_words - 1, seed) != buffer[page_words - 1]:
            return DAMAGED, job
        count = min(per_page, table[number, 2] - page * per_page)
        low = 0
        for i in range(jobs[job, 2], jobs[job, 3]):
            if owner[i] != number:
                continue
            high = count
            while high > low:  # the first record whose hash is no less
                middle = (low + high) >> 1
                if hash_of(word(held, middle * size)) < hashed[i]:
                    low = middle + 1
                else:
                    high = middle
            if low < count and word(held, low * size) == ids[i]:
                copy(flat, order[i] * size, held, low * size, size)
                found[order[i]] = 1
    return WHOLE, -1


@njit(cache=True, nogil=True)
def hashes_of(records, out):
    """The hash of each record (n, size), uint64."""
    flat, size = records.reshape(-1), records.shape[1]
    for i in range(len(records)):
        out[i] = hash_of(word(flat, i * size))


@njit(cache=True, nogil=True)
def unseal(pages, first, count, size, seed, out):
    """Copy the records of whole `pages` (n, words) uint64, which are the pages from `first` on of a segment of `count`
    records, to `out` (records, size). Returns the number of the first damaged page, -1 where all are whole.
    """
    words, flat = pages.reshape(-1), out.reshape(-1)
    held, page_words = words.view(np.uint8), pages.shape[1]
    per_page = (page_words * 8 - 8) // size
    for i in range(len(pages)):
        if checksum(words, i * page_words, page_words - 1, seed + np.uint64(first + i)) != pages[i, page_words - 1]:
            return first + i
        here = min(per_page, count - (first + i) * per_page)
        copy(flat, i * per_page * size, held, i * page_words * 8, here * size)
    return -1


@njit(cache=True, nogil=True)
def seal(records, first, seed, pages, firsts):
    """The inverse of `unseal`: records (n, size) into zeroed `pages`, with the first hash of each into `firsts`."""
    words, flat = pages.reshape(-1), records.reshape(-1)
    held, page_words, size = words.view(np.uint8), pages.shape[1], records.shape[1]
    per_page = (page_words * 8 - 8) // size
    for i in range(len(pages)):
        here = min(per_page, len(records) - i * per_page)
        copy(held, i * page_words * 8, flat, i * per_page * size, here * size)
        firsts[i] = hash_of(word(flat, i * per_page * size))
        pages[i, page_words - 1] = checksum(words, i * page_words, page_words - 1, seed + np.uint64(first + i))


@njit(cache=True, nogil=True)
def merge(old, new, removed, out):
    """`old` records with those of `new` in place of the same ids, without the new that are `removed`, all by ascending
    hash (n, size); returns how many there are in `out`.
    """
    size = old.shape[1]
    a, b, target = old.reshape(-1), new.reshape(-1), out.reshape(-1)
    i = j = count = 0
    while i < len(old) or j < len(new):
        take_new = i == len(old)
        if not take_new and j < len(new):
            left, right = word(a, i * size), word(b, j * size)
            if left == right:
                i += 1
                take_new = True
            else:
                take_new = hash_of(right) < hash_of(left)
        if take_new:
            if not removed[j]:
                copy(target, count * size, b, j * size, size)
                count += 1
            j += 1
        else:
            copy(target, count * size, a, i * size, size)
            count += 1
            i += 1
    return count


@njit(cache=True, nogil=True)
def first_at_least(records, hashed):
    """Place of the first record whose hash is at least `hashed`; their number where there is none."""
    flat, size = records.reshape(-1), records.shape[1]
    low, high = 0, len(records)
    while high > low:
        middle = (low + high) >> 1
        if hash_of(word(flat, middle * size)) < hashed:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def read_blindly(files, places, first, step, buffer):
    """Read a page at each of `places[first::step]`, to see how fast the disk is."""
    for i in range(first, len(files), step):
        fill(files[i], buffer.ctypes.data, len(buffer) * 8, places[i])
