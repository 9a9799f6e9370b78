"""Which replica is wrong, from results that all should have alike. Pure functions. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Seen(NamedTuple):
    """What is compared of one pass."""

    digest: int
    """Of the bits of the gradient and of the metric sums."""

    sketch: tuple[float, ...] = ()
    """Of the gradient: its norm, and sums of it with several patterns of signs. A change of one number changes each of
    these sums by as much.
    """


def near(one: Seen, other: Seen, bound: float) -> bool:
    """Whether two passes differ by no more than rounding: by `bound` of the gradient's norm."""
    if one.digest == other.digest:
        return True
    norm = max(one.sketch[0], other.sketch[0])
    if not math.isfinite(norm):  # a loss that is not finite, which has no other digits
        return [math.isfinite(a) for a in one.sketch] == [math.isfinite(b) for b in other.sketch]
    return all(abs(a - b) <= bound * norm for a, b in zip(one.sketch, other.sketch, strict=True))


class Verdict(NamedTuple):
    """Of results that are not all alike."""

    wrong: tuple[int, ...]
    """Who is wrong. Empty: nothing tells."""

    differ: tuple[int, ...]
    """One of each group that agrees."""


def judge(results: Mapping[int, Sequence[T]], alike: Callable[[T, T], bool]) -> Verdict | None:
    """None where all results are alike. Otherwise the largest group of replicas counts that each agree with themselves
    and with each other; all others are wrong. Of two largest groups nothing tells which is right.
    """
    kinds: list[T] = []

    def kind(result: T) -> int:
        for number, known in enumerate(kinds):
            if alike(known, result):
                return number
        kinds.append(result)
        return len(kinds) - 1

    views = {who: {kind(result) for result in own} for who, own in results.items()}
    if len(kinds) <= 1:
        return None
    steady = {who: next(iter(view)) for who, view in views.items() if len(view) == 1}
    ranked = Counter(steady.values()).most_common()
    if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        return Verdict(tuple(who for who in views if steady.get(who) != ranked[0][0]), tuple(views))
    firsts = {frozenset(view): who for who, view in reversed(views.items())}
    return Verdict((), tuple(sorted(firsts.values())))
