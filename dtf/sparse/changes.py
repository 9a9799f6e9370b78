"""Which rows of a table changed since it was last saved, and which ids left. Numpy arrays, no torch."""

from __future__ import annotations

import numpy as np

from dtf.sparse.row_index import reserve


class Changes:
    """Of a table with so many positions: a byte for each."""

    def __init__(self, positions: int) -> None:
        # one more than there are: -1, which stands for no row, has it
        self.flags = reserve(positions + 1, 1, np.dtype(np.bool_)).reshape(-1)
        self._left: list[np.ndarray] = []

    def mark(self, positions: np.ndarray) -> None:
        """The rows at some positions changed, or are new."""
        self.flags[positions] = True

    def leave(self, ids: np.ndarray, positions: np.ndarray) -> None:
        """These ids left, and their positions are free."""
        self._left.append(ids)
        self.flags[positions] = False

    def move(self, were: np.ndarray, are: np.ndarray) -> None:
        """Rows are at other positions, which were free."""
        self.flags[are] = self.flags[were]
        self.flags[were] = False

    def count(self) -> int:
        """How many rows changed."""
        return int(np.count_nonzero(self.flags[:-1]))

    def left(self) -> np.ndarray:
        """The ids that left, whether they are back or not; ascending."""
        self._left = [np.unique(np.concatenate([np.empty(0, np.int64), *self._left]))]
        return self._left[0]
