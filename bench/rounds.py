"""Who runs when: in each round all of them, each time in the other direction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from bench.peers import Absent

Given = TypeVar("Given")
Found = TypeVar("Found")


def alternating(rounds: int, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The number of each round, and each of the names that are there when it begins."""
    for number in range(rounds):
        for name in list(names)[:: -1 if number % 2 else 1]:
            yield number, name


def in_turn(
    rounds: int, those: Mapping[str, Given], once: Callable[[Given], Found]
) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """What `once` found for each of those that ran to the end, one for each round; and why the others did not, who take
    part in no further round. Says who begins, as each may take long.
    """
    found: dict[str, list[Found]] = {name: [] for name in those}
    absent: dict[str, str] = {}
    for number, name in alternating(rounds, found):
        if number == 0:
            starts(name)
        try:
            found[name].append(once(those[name]))
        except Absent as error:
            absent[name] = f"in round {number + 1}: {error}"
            del found[name]
    return found, absent


def starts(who: str) -> None:
    """Tell the user what is under way."""
    print(f"  {who} starts", file=sys.stderr, flush=True)
