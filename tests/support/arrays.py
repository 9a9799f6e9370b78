"""Which of all combinations run by default: enough that each strategy meets each value, and not more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(
    variants: Sequence[tuple[str, dict[str, Any]]],
    values: Sequence[Any],
    turns: Sequence[Any] = (),
    usual: Sequence[Any] = (),
) -> list[Any]:
    """Parameters (strategy, options, value) of all combinations.

    By default a strategy without options meets all values (those of `usual`, if given), and one with options a single
    one of `turns` (the same unless given; None: with none), each the next. The others are slow.
    """
    usual, found, place = usual or values, [], 0
    turns = turns or usual
    for strategy, options in variants:
        chosen = [turns[place % len(turns)]] if options else usual
        place += bool(options)
        for value in values:
            marks = () if value in chosen else pytest.mark.slow
            found.append(pytest.param(strategy, options, value, id=f"{strategy}-{options}-{value}", marks=marks))
    return found


def plain(variants: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Parameters (strategy, options); those with options are slow, where `crossed` has other tests meet them."""
    return [
        pytest.param(strategy, options, id=f"{strategy}-{options}", marks=pytest.mark.slow if options else ())
        for strategy, options in variants
    ]
