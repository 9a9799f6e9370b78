"""Changes bytes as broken disks, torn writes and people who mean harm do: always the same ones for a seed."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

NUMBERS = [0, 1, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TOKENS = [
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b'"\\ud800"',
    b"9" * 400,
    b"0.5",
    b"\0",
    b"\xff",
]
TOKENS += [b"../x", b"[" * 60, b'{"a":' * 60, b"\n", b"'", b"${x}", b"&a [*a]", b"!!python/name:os.system"]
A_MINUTE = -1
"""A number of inputs: as many as that time allows."""
BESIDE_BYTES = 32 << 20
"""Memory that a decoder may take for whatever input, beside a multiple of its size."""


def mutations(seeds: Sequence[bytes], count: int, tokens: Sequence[bytes] = ()) -> Iterator[bytes]:
    """`count` inputs, or as many as a minute takes: each is one of `seeds` with one to four changes."""
    draw, words, until = random.Random(0), [*TOKENS, *tokens], time.monotonic() + 60.0
    for number in itertools.count():
        if number == count or (count == A_MINUTE and time.monotonic() > until):
            return
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            _change(data, draw, seeds, words)
        yield bytes(data)


def _change(data: bytearray, draw: random.Random, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 2, 8, 64)))
    match draw.randrange(8):
        case 0 if data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        case 1 if data:
            data[at % len(data)] = draw.randrange(256)
        case 2:
            del data[at:]
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = data[at:end]
        case 5:
            other = draw.choice(seeds)
            start = draw.randrange(len(other) + 1)
            data[at:end] = other[start : start + draw.choice((1, 8, 64, 1 << 20))]
        case 6:  # a length or an offset
            size = draw.choice((1, 2, 4, 8))
            number = draw.choice(NUMBERS) + draw.choice((-1, 0, 0, 1))
            data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        case _:
            data[at:end] = draw.choice(words)


def fuzz(
    judge: Callable[[bytes], bool], seeds: Sequence[bytes], count: int, tokens: Sequence[bytes] = (), watch: bool = True
) -> None:
    """Give `count` changed inputs, or a minute's, to `judge`, which says whether one was accepted, and raises when it
    was not as it must be. Not all are accepted. `watch`: no input may take much more memory than it has bytes.
    """
    accepted = given = 0
    assert all(map(judge, seeds)), "a seed is no input"
    if watch:
        tracemalloc.start()
    try:
        for number, data in enumerate(mutations(seeds, count, tokens)):
            given, before = number + 1, tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            try:
                accepted += judge(data)
            except BaseException:
                print(f"input {number}: {data[:2000]!r}")
                raise
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < BESIDE_BYTES + 200 * len(data), (number, taken, data[:200])
    finally:
        tracemalloc.stop()
    assert accepted < given
