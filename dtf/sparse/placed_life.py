"""The life of rows that lie in memory: each virtual shard has a part of the positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dtf.sparse.life import LAST_STEP, SCORE, Life, ShardRows
from dtf.sparse.row_index import reserve

if TYPE_CHECKING:
    from dtf.api.row_life import RowLife
    from dtf.api.sparse_table import Table


class PlacedLife(Life):
    """See `Life`. Rows of shard s are at positions starts[s] to starts[s] + counts[s] - 1."""

    def __init__(self, spec: Table, rule: RowLife, seed: int, name: str) -> None:
        super().__init__(spec, rule, seed, name)
        self.starts = np.concatenate([[0], np.cumsum(self.limits)])
        rows = int(self.starts[-1])
        self.ids = reserve(rows, 1, np.dtype(np.int64)).reshape(-1)
        self._last = reserve(rows, 1, np.dtype(np.int32)).reshape(-1)
        self._scores = reserve(rows, 1, np.dtype(np.float32)).reshape(-1)

    def byte_count(self) -> int:
        beside = sum(array.itemsize for array in (self.ids, self._last, self._scores))
        return super().byte_count() + len(self) * beside

    def show(self, positions: np.ndarray, seen: np.ndarray, step: int) -> None:
        """Count for the rows at `positions` (U,), -1 for none, how often they were shown and clicked, `seen` (U, 2)."""
        self.kernels.show(positions, seen, step, self.rule.score_decay, self._scores, self._last)

    def overdue_at(self, step: int) -> np.ndarray:
        """Positions of the rows that leave in this step, of the shard that is `due`."""
        found = [np.empty(0, np.int64)]
        for _, at, rows in self.rows_of(self.due(step)):
            found.append(at[self.overdue(rows, step)])
        return np.concatenate(found)

    def lowest_at(self, shards: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        """Positions of the rows that leave crowded shards, see `lowest`."""
        out = np.empty(int(self.counts[shards].sum()), np.int64)
        where = self.starts, self.counts, self.limits, self.ids, self._scores, self._last
        return out[: self.kernels.lowest(shards, coming, *where, step, self.rule.score_decay, out)]

    def settle(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray, last: np.ndarray | int) -> np.ndarray:
        """Positions (n,) for new rows, for which there is room."""
        positions = np.empty(len(ids), np.int64)
        self.kernels.settle(shards, self.starts, self.counts, positions)
        self.ids[positions] = ids
        self._scores[positions], self._last[positions] = scores, last
        return positions

    def leave(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Let the rows at some positions leave, those of a shard together. The last rows of a shard take their places:
        returns where these were, and where they are now.
        """
        shards = np.searchsorted(self.starts, positions, side="right") - 1
        were, are = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        moved = self.kernels.close(positions, shards, self.starts, self.counts, were, are)
        were, are = were[:moved], are[:moved]
        for array in (self.ids, self._last, self._scores):
            array[are] = array[were]
        return were, are

    def statistics(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The statistics of rows, as a checkpoint keeps them."""
        return {LAST_STEP: self._last[positions], SCORE: self._scores[positions]}

    def rows_of(self, shards: np.ndarray) -> Iterator[tuple[int, np.ndarray, ShardRows]]:
        """Each of some shards, the positions (n,) of its rows, and what is known of them."""
        for shard in shards.tolist():
            at = int(self.starts[shard]) + np.arange(int(self.counts[shard]))
            yield shard, at, ShardRows(self.ids[at], self._scores[at], self._last[at])
