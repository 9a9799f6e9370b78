"""Which of all combinations run by default; the others are slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

SAME_PROGRAM = ("zero1", "fsdp", "tensor")
"""Strategies with the program of ddp. By default ddp alone tries what a program does with a recipe or with rows."""


def crossed(
    variants: Sequence[tuple[str, dict[str, Any]]],
    values: Sequence[Any],
    turns: Sequence[Any] = (),
    usual: Sequence[Any] = (),
    each: int = 0,
    programs: bool = False,
) -> list[Any]:
    """Parameters (strategy, options, value) of all combinations. `programs`: by default those of SAME_PROGRAM are left
    out, and with them all options.

    By default a strategy without options meets all values (those of `usual`, if given), or `each` of them: the first
    strategy the first values, the second those that follow, and so on. A strategy with options meets one value of
    `turns` (those values, unless given): the first such strategy the first value, and so on; None stands for no value.
    The others are slow.
    """
    usual, found, place, plain = usual or values, [], 0, 0
    turns, each = turns or usual, each or len(usual)
    for strategy, options in variants:
        chosen = [turns[place % len(turns)]] if options else [usual[(plain + i) % len(usual)] for i in range(each)]
        place += bool(options)
        plain += each * (not options)
        if programs and (options or strategy in SAME_PROGRAM):
            chosen = []
        for value in values:
            marks = () if value in chosen else pytest.mark.slow
            found.append(pytest.param(strategy, options, value, id=f"{strategy}-{options}-{value}", marks=marks))
    return found


def seldom(cases: Sequence[tuple[Any, ...]], usual: Callable[..., bool]) -> list[Any]:
    """Parameters of all cases; those for which `usual`, called with a case, is false are slow."""
    return [pytest.param(*case, marks=() if usual(*case) else pytest.mark.slow) for case in cases]


def plain(variants: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Parameters (strategy, options); by default those without options, each program once."""
    return [
        pytest.param(
            strategy,
            options,
            id=f"{strategy}-{options}",
            marks=pytest.mark.slow if options or strategy in SAME_PROGRAM else (),
        )
        for strategy, options in variants
    ]
