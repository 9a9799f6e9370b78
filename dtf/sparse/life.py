"""The life of a table's rows: which ids get one, which leave, and where they lie (`RowLife` has the options).

Every decision is made inside a virtual shard, which a hash of the id gives, by a total order: score, last step, id.
Rows of a shard are always together, and what is counted does not depend on how a global batch is divided. So any number
of ranks and servers decides alike. Numpy arrays, no torch; U: distinct ids of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtf.core.seeding import seed_of
from dtf.sparse.row_index import reserve

if TYPE_CHECKING:
    from dtf.api.row_life import RowLife
    from dtf.api.sparse_table import Table

LAST_STEP, SCORE = "life.last_step", "life.score"
"""In an export and a checkpoint: statistics of a row."""


_CELLS_PER_ROW = 4  # of each row of cells of the filter, for a row that its shard has room for


class Life:
    """Where the rows of a table lie: those of shard s at positions starts[s] to starts[s] + counts[s] - 1.

    `admitted`, `evicted`: rows made, and rows that left. `refused`: ids of a step that had no row and got none.
    """

    def __init__(self, spec: Table, rule: RowLife, seed: int, name: str) -> None:
        from dtf.sparse import life_kernels

        self._kernels, self._rule, shards = life_kernels, rule, rule.shards(spec)
        self._bits = shards.bit_length() - 1
        ends = spec.capacity * np.arange(shards + 1, dtype=object) // shards
        limits = np.diff(ends).astype(np.int64)
        self._share = int(limits.max())
        if 0 < spec.size <= spec.capacity:  # there is room for all ids, and a hash divides them about evenly
            limits += 8 * np.ceil(np.sqrt(limits)).astype(np.int64) + 8
        self.limits, self.starts = limits, np.concatenate([[0], np.cumsum(limits)])
        self.counts = np.zeros(shards, np.int64)
        rows = int(self.starts[-1])
        self.ids = reserve(rows, 1, np.dtype(np.int64)).reshape(-1)
        self._last = reserve(rows, 1, np.dtype(np.int32)).reshape(-1) if rule.scores else None
        self._scores = reserve(rows, 1, np.dtype(np.float32)).reshape(-1) if rule.scores else None
        self.filter: np.ndarray | None = None
        self.filtered = np.zeros(shards, np.int64)
        if rule.admit_count > 1:
            cells = 1 << (_CELLS_PER_ROW * self._share - 1).bit_length()
            flat = reserve(shards * life_kernels.PROBES, cells, np.dtype(np.uint8))
            self.filter = flat.reshape(shards, life_kernels.PROBES, cells)
        self._key = np.uint64(seed_of(seed, "admit", name))
        self.admitted = self.refused = self.evicted = 0

    def by_shard(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of each shard beside its rows: the counts of ids without one, and how many shows
        these are of. Of another capacity it has another name, and counting begins anew.
        """
        if self.filter is None:
            return {}
        size = f"{len(self.filter)}x{self.filter.shape[-1]}"
        return {f"life/filter_{size}": self.filter, f"life/filtered_{size}": self.filtered}

    def __len__(self) -> int:
        return int(self.counts.sum())

    def byte_count(self) -> int:
        """Memory of what is kept beside rows and index."""
        beside = sum(array.itemsize for array in (self.ids, self._last, self._scores) if array is not None)
        return len(self) * beside + (0 if self.filter is None else self.filter.nbytes)

    def shards(self, ids: np.ndarray) -> np.ndarray:
        """The virtual shard of each id."""
        out = np.empty(len(ids), np.int64)
        self._kernels.shards_of(ids, self._bits, out)
        return out

    # ------------------------------------------------------------ a step

    def show(self, positions: np.ndarray, seen: np.ndarray, step: int) -> None:
        """Count for the rows at `positions` (U,), -1 for none, how often they were shown and clicked, `seen` (U, 2)."""
        if self._scores is not None:
            self._kernels.show(positions, seen, step, self._rule.score_decay, self._scores, self._last)

    def admit(self, ids: np.ndarray, seen: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the ids without a row may have one, bool (n,), and the shows that each was seen with so far."""
        may, shows = np.ones(len(ids), bool), seen[:, 0].astype(np.int64)
        if self.filter is not None:
            shards = self.shards(ids)
            limits = 2 * np.maximum(self.limits, 1)
            self._kernels.count(self.filter, self.filtered, limits, ids, shards, seen, shows)
            may = shows >= self._rule.admit_count
        if self._rule.admit_probability < 1:
            drawn = np.empty(len(ids), bool)
            self._kernels.lucky(self._key, ids, seen, step, self._rule.admit_probability, drawn)
            may = may & drawn
        return may, shows

    def overdue(self, step: int) -> np.ndarray:
        """Positions of the rows that leave in this step, of one shard in turn: unseen for long, or of low score."""
        rule, shard = self._rule, step % len(self.counts)
        at = self._positions(shard)
        if self._last is None or not (rule.evict_unseen or rule.evict_score) or not len(at):
            return at[:0]
        leaves = np.zeros(len(at), bool)
        if rule.evict_unseen:
            leaves |= step - self._last[at].astype(np.int64) > rule.evict_unseen
        if rule.evict_score:
            leaves |= (self.scores(at, step) < rule.evict_score) & (self._last[at] < step)
        return at[leaves]

    def crowded(self, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shards without room for so many new rows, and how many come to each; `shards` (n,): one for each row."""
        coming = np.bincount(shards, minlength=len(self.counts))
        crowded = np.flatnonzero(self.counts + coming > self.limits)
        return crowded, coming[crowded]

    def lowest(self, shards: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        """Positions of the rows that leave crowded shards: the lowest ones down to 7/8 of its room, or as many more as
        those that come need, and never rows of this step.
        """
        if self._last is None or not self._rule.evicts_when_full:
            return np.empty(0, np.int64)
        out = np.empty(int(self.counts[shards].sum()), np.int64)
        where = self.starts, self.counts, self.limits, self.ids, self._scores, self._last
        return out[: self._kernels.lowest(shards, coming, *where, step, self._rule.score_decay, out)]

    def fits(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Which of some new rows there is room for, bool (n,): the highest of each shard."""
        order = np.lexsort((ids, -scores, shards))
        rank = np.arange(len(ids)) - np.searchsorted(shards[order], shards[order])
        fits = np.empty(len(ids), bool)
        fits[order] = rank < (self.limits - self.counts)[shards[order]]
        return fits

    # ------------------------------------------------------------ places

    def settle(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray, last: np.ndarray | int) -> np.ndarray:
        """Positions (n,) for new rows, for which there is room."""
        positions = np.empty(len(ids), np.int64)
        self._kernels.settle(shards, self.starts, self.counts, positions)
        self.ids[positions] = ids
        if self._scores is not None and self._last is not None:
            self._scores[positions], self._last[positions] = scores, last
        self.admitted += len(ids)
        return positions

    def leave(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Let the rows at some positions leave, those of a shard together. The last rows of a shard take their places:
        returns where these were, and where they are now.
        """
        shards = np.searchsorted(self.starts, positions, side="right") - 1
        were, are = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        moved = self._kernels.close(positions, shards, self.starts, self.counts, were, are)
        were, are = were[:moved], are[:moved]
        for array in (self.ids, self._last, self._scores):
            if array is not None:
                array[are] = array[were]
        self.evicted += len(positions)
        return were, are

    def statistics(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The statistics of rows, as a checkpoint keeps them."""
        if self._last is None or self._scores is None:
            return {}
        return {LAST_STEP: self._last[positions], SCORE: self._scores[positions]}

    def overfull(
        self, shard: int, ids: np.ndarray, scores: np.ndarray, last: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the rows of a shard and some more that are loaded, the lowest that find no room: positions of those that
        leave, and the indices of those that do not come.
        """
        at = self._positions(shard)
        excess = len(at) + len(ids) - int(self.limits[shard])
        here = self.scores(at, step), np.zeros(len(at)) if self._last is None else self._last[at], self.ids[at]
        coming = np.empty(len(ids))
        self._kernels.decayed(scores, last, step, self._rule.score_decay, coming)
        out = lowest(
            tuple(np.concatenate(pair) for pair in zip(here, (coming, last, ids), strict=True)), max(0, excess)
        )
        return at[out[out < len(at)]], out[out >= len(at)] - len(at)

    def _positions(self, shard: int) -> np.ndarray:
        return np.arange(self.starts[shard], self.starts[shard] + self.counts[shard])

    def scores(self, positions: np.ndarray, step: int) -> np.ndarray:
        """The scores (n,) at `step` of the rows at some positions; zeros where none are kept."""
        out = np.zeros(len(positions))
        if self._scores is not None and self._last is not None:
            self._kernels.decayed(self._scores[positions], self._last[positions], step, self._rule.score_decay, out)
        return out


def lowest(keys: tuple[np.ndarray, ...], count: int) -> np.ndarray:
    """Indices of the `count` lowest by the first key, among equals by the second, and so on; in no order."""
    found, among = [np.empty(0, np.int64)], np.arange(len(keys[0]))
    for key in keys:
        if count <= 0 or count >= len(among):
            break
        values = key[among]
        bar = np.partition(values, count - 1)[count - 1]
        found.append(among[values < bar])
        count -= len(found[-1])
        among = among[values == bar]
    return np.concatenate([*found, among[: max(0, count)]])
