"""Which operation a rank is in that waits for other ranks, in memory that it shares with the launching process.

A rank writes the last entries, numbered; the launching process compares those of its ranks and says who waits for whom.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from time import monotonic
from typing import Any, NamedTuple

RING = 1024
"""Entries of a rank that are kept."""

_AT, _COUNT, _LEFT, _PLACE, _PLACES, _TEXT = range(6)  # numbers before the ring
_HEAD = 6
_SLOT = 3  # an entry: code, number on its group, parts of steps entered before
NUMBERS = 8 * (_HEAD + _SLOT * RING)
"""Bytes of the numbers; behind them lie the names, a JSON line each."""

_numbers = memoryview(bytearray(NUMBERS)).cast("d")  # of this rank; nobody reads them until `attach`
_names: memoryview | None = None
_lines: list[bytes] = []


class Entry(NamedTuple):
    """One entry of a rank into an operation, or its use of a module."""

    name: str  # such as `all-gather of layer3`; empty where there was no more room for names
    group: str  # which communicator, the same text on all ranks; empty: nothing is known of who takes part
    ranks: tuple[int, ...]  # of the group
    number: int  # of this rank's entries on the group, from 1
    ordered: bool  # all ranks of the group enter the same operations in the same order
    used: bool = False  # the module `name` was used; nobody waits
    advice: str = ""  # where only some ranks use a module: what to do
    places: int = 0  # how many parts of steps the rank had entered


class Position(NamedTuple):
    """Where a rank is. `at`: time.monotonic() of the last change, 0 before the first."""

    at: float = 0.0
    entries: tuple[Entry, ...] = ()  # the last ones, the newest last
    inside: bool = False  # it has not left the newest
    place: str = ""  # the part of a step it entered last, such as `backward`
    places: int = 0  # how many parts it entered
    complete: bool = True  # `entries` are all


class Group:
    """Ranks that take part in the same operations."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks, self.count = name, tuple(ranks), 0


class Operation:
    """A context: inside it this rank waits, on the host, for others. Entering and leaving take about a microsecond."""

    __slots__ = ("_code", "_group")

    def __init__(self, name: str, group: Group, ordered: bool = True) -> None:
        """`ordered`: all ranks of the group enter the same operations, in the same order."""
        self._group = group
        self._code = _define([name, group.name, group.ranks, ordered, False, ""])

    def __enter__(self) -> None:
        numbers, group = _numbers, self._group
        group.count += 1
        count = numbers[_COUNT] + 1.0
        at = _HEAD + _SLOT * (int(count) % RING)
        numbers[at] = self._code
        numbers[at + 1] = group.count
        numbers[at + 2] = numbers[_PLACES]
        numbers[_AT] = monotonic()
        numbers[_COUNT] = count

    def __exit__(self, *_: object) -> None:
        numbers = _numbers
        numbers[_AT] = monotonic()
        numbers[_LEFT] = numbers[_COUNT]


class Use:
    """Called before the forward pass of a module: this rank uses it now. `advice`: see Entry."""

    __slots__ = ("_code",)

    def __init__(self, name: str, advice: str) -> None:
        self._code = _define([name, "", [], False, True, advice])

    def __call__(self, *_: object) -> None:
        numbers = _numbers
        count = numbers[_COUNT] + 1.0
        at = _HEAD + _SLOT * (int(count) % RING)
        numbers[at] = self._code
        numbers[at + 2] = numbers[_PLACES]
        numbers[_AT] = monotonic()
        numbers[_COUNT] = numbers[_LEFT] = count


@cache
def group_of(name: str, ranks: tuple[int, ...]) -> Group:
    """The group of this name and these ranks; its entries are counted together."""
    return Group(f"{name} {','.join(map(str, ranks))}", ranks)


@cache
def operation(name: str, group: Group, ordered: bool = True) -> Operation:
    """The operation of this name, defined at the first call."""
    return Operation(name, group, ordered)


def place(name: str) -> None:
    """This rank enters a part of a step."""
    numbers = _numbers
    numbers[_PLACE] = _place_code(name)
    numbers[_PLACES] += 1.0
    numbers[_AT] = monotonic()


@cache
def _place_code(name: str) -> int:
    return _define([name, "", [], False, False, ""])


def _define(fields: list[object]) -> int:
    """The code of a new name, from 1."""
    _lines.append(json.dumps(fields).encode() + b"\n")
    if _names is not None:
        _write([_lines[-1]])
    return len(_lines)


def _write(lines: list[bytes]) -> None:
    """Add names behind those that are there. Without room for one, it and all later ones stay away."""
    assert _names is not None
    used = int(_numbers[_TEXT])
    for line in lines:
        end = used + len(line)
        if used < 0 or end > len(_names):
            _numbers[_TEXT] = -abs(used)
            return
        _names[used:end] = line
        used = end
        _numbers[_TEXT] = used


def attach(cell: memoryview) -> None:
    """From now on this process writes into this memory, all zeros."""
    global _numbers, _names
    _numbers, _names = cell[:NUMBERS].cast("d"), cell[NUMBERS:]
    _write(_lines)


_NAMELESS: list[Any] = ["", "", [], False, False, ""]


@lru_cache(maxsize=64)
def _parse(text: bytes) -> list[list[Any]]:
    return [json.loads(line) for line in text.splitlines()]


def read(cell: memoryview, last: int = RING) -> Position:
    """What the rank wrote last that writes into this memory; of its entries the `last` ones."""
    numbers = cell[:NUMBERS].cast("d")
    count, left, text = int(numbers[_COUNT]), int(numbers[_LEFT]), abs(int(numbers[_TEXT]))
    if not numbers[_AT]:
        return Position()
    names = _parse(bytes(cell[NUMBERS : NUMBERS + text]))

    def entry(number: int) -> Entry:
        at = _HEAD + _SLOT * (number % RING)
        code = int(numbers[at])
        name, group, ranks, ordered, used, advice = names[code - 1] if 0 < code <= len(names) else _NAMELESS
        return Entry(name, group, tuple(ranks), int(numbers[at + 1]), ordered, used, advice, int(numbers[at + 2]))

    place_code = int(numbers[_PLACE])
    return Position(
        numbers[_AT],
        tuple(entry(number) for number in range(max(1, count - last + 1), count + 1)),
        left < count,
        names[place_code - 1][0] if 0 < place_code <= len(names) else "",
        int(numbers[_PLACES]),
        count <= last,
    )


def changed(cell: memoryview) -> float:
    """`Position.at` of the rank that writes into this memory."""
    return cell[:8].cast("d")[_AT]


def clear(cell: memoryview) -> None:
    """Forget a rank, for a new process that starts in its place."""
    if changed(cell):  # else it is untouched, and takes no memory
        cell[:NUMBERS] = bytes(NUMBERS)
