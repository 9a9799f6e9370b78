"""How the parts of a row lie: its numbers and its state side by side; on disk what else is known of it, as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtf.sparse.life import LAST_STEP, SCORE

if TYPE_CHECKING:
    from dtf.api.row_optimizer import RowOptimizer

DECAYED = "decayed"
EXTRAS = {DECAYED: np.dtype(np.float64), LAST_STEP: np.dtype(np.int32), SCORE: np.dtype(np.float32)}
"""What may be kept of a row beside its numbers and its state."""


def columns_of(rule: RowOptimizer, width: int) -> dict[str, slice]:
    """The columns of each state in records of rows of `width` numbers, which come first."""
    columns, stop = {}, width
    for state, (count, _) in rule.states(width).items():
        columns[state] = slice(stop, stop + count)
        stop += count
    return columns


def extras_of(rule: RowOptimizer) -> dict[str, slice]:
    """The bytes of each of `EXTRAS` beside a record on disk."""
    places, stop = {}, 0
    for name in [DECAYED] * rule.decays + [LAST_STEP, SCORE] * rule.lives:
        places[name] = slice(stop, stop + EXTRAS[name].itemsize)
        stop = places[name].stop
    return places


def extra_of(name: str, extra: np.ndarray, where: slice) -> np.ndarray:
    """One of `EXTRAS` (n,), where `extra` (n, bytes) has all of a row; the same memory."""
    return extra[:, where].view(EXTRAS[name])[:, 0]
