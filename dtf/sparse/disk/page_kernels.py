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
_S32 = np.uint64(32)
_LANES = 8
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


word: Any = _word  # called without the context
copy: Any = _copy


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
def plan(firsts, hashed, begin, end, segment, jobs, count):
    """Name the pages that may hold the records of ascending `hashed[begin:end]`: rows (segment, page, begin, end) of
    `jobs` from `count` on; returns their new count. `firsts`: first hash of each page of the segment.
    """
    i = begin
    while i < end and hashed[i] < firsts[0]:
        i += 1
    low = 0
    while i < end:
        high = len(firsts)  # the page is in [low, high)
        while high - low > 1:
            middle = (low + high) >> 1
            if firsts[middle] <= hashed[i]:
                low = middle
            else:
                high = middle
        stop = i + 1
        while stop < end and (low + 1 == len(firsts) or hashed[stop] < firsts[low + 1]):
            stop += 1
        jobs[count, 0], jobs[count, 1], jobs[count, 2], jobs[count, 3] = segment, low, i, stop
        count += 1
        i = stop
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
def read_jobs(jobs, first, step, segments, start, ids, hashed, order, size, buffer, out, found):
    """Read the pages of jobs first, first + step, ... (see `plan`) of files whose pages begin at `start`, and copy
    records of `ids` (sorted as `hashed`) to `out[order]` (n, size), with `found[order]` 1. Returns how it ended, and
    the job.

    `segments` (n, 3) int64: file, seed of checksums, records. `buffer` uint64: room for one page, aligned as the device
    needs it.
    """
    page_words = len(buffer)
    page_bytes = page_words * 8
    held, flat = buffer.view(np.uint8), out.reshape(-1)
    per_page = (page_bytes - 8) // size
    for job in range(first, len(jobs), step):
        segment, page = jobs[job, 0], jobs[job, 1]
        if fill(segments[segment, 0], buffer.ctypes.data, page_bytes, start + page * page_bytes) < page_bytes:
            return UNREADABLE, job
        seed = np.uint64(segments[segment, 1]) + np.uint64(page)
        if checksum(buffer, 0, page_words - 1, seed) != buffer[page_words - 1]:
            return DAMAGED, job
        count = min(per_page, segments[segment, 2] - page * per_page)
        low = 0
        for i in range(jobs[job, 2], jobs[job, 3]):
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
