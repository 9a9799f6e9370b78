"""Which of all combinations run by default; the others are slow."""

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

    By default a strategy without options meets all values (those of `usual`, if given). A strategy with options meets
    one value of `turns` (those values, unless given): the first such strategy the first value, and so on; None stands
    for no value. The others are slow.
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
    """Parameters (strategy, options); by default those without options."""
    return [
        pytest.param(strategy, options, id=f"{strategy}-{options}", marks=pytest.mark.slow if options else ())
        for strategy, options in variants
    ]
