"""The life of a table's rows: which ids get one, and which leave (`RowLife` has the options).

Every decision is made inside a virtual shard, which a hash of the id gives, by a total order: score, last step, id.
Rows of a shard are always together, and what is counted does not depend on how a global batch is divided. So any number
of ranks and servers decides alike, wherever rows lie. Numpy arrays, no torch; U: distinct ids of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtf.core.seeding import seed_of
from dtf.sparse.row_index import reserve

if TYPE_CHECKING:
    from dtf.api.row_life import RowLife
    from dtf.api.sparse_table import Table

LAST_STEP, SCORE = "life.last_step", "life.score"
"""In an export and a checkpoint: statistics of a row."""


_CELLS_PER_ROW = 4  # of each row of cells of the filter, for a row that its shard has room for


class ShardRows(NamedTuple):
    """What is known of rows of one shard, in any order."""

    ids: np.ndarray  # (n,)
    scores: np.ndarray  # (n,) float32, as they were at the step `last`
    last: np.ndarray  # (n,) the step that showed the id last


class Life:
    """What is decided of the rows of a table. `counts` (shards,): rows of each shard; `limits`: for how many it has
    room.

    `admitted`, `evicted`: rows made, and rows that left. `refused`: ids of a step that had no row and got none.
    """

    def __init__(self, spec: Table, rule: RowLife, seed: int, name: str) -> None:
        from dtf.sparse import life_kernels

        self.kernels, self.rule, shards = life_kernels, rule, rule.shards(spec)
        self._bits = shards.bit_length() - 1
        ends = spec.capacity * np.arange(shards + 1, dtype=object) // shards
        limits = np.diff(ends).astype(np.int64)
        self._share = int(limits.max())
        if 0 < spec.size <= spec.capacity:  # there is room for all ids, and a hash divides them about evenly
            limits += 8 * np.ceil(np.sqrt(limits)).astype(np.int64) + 8
        self.limits, self.counts = limits, np.zeros(shards, np.int64)
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
        return 0 if self.filter is None else self.filter.nbytes

    def shards(self, ids: np.ndarray) -> np.ndarray:
        """The virtual shard of each id."""
        out = np.empty(len(ids), np.int64)
        self.kernels.shards_of(ids, self._bits, out)
        return out

    def hashes(self, shard: int) -> tuple[int, int]:
        """The least and the largest hash of the ids of a shard."""
        return shard << 64 - self._bits, ((shard + 1) << 64 - self._bits) - 1

    # ------------------------------------------------------------ which rows are made

    def admit(self, ids: np.ndarray, seen: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the ids without a row may have one, bool (n,), and the shows that each was seen with so far."""
        may, shows = np.ones(len(ids), bool), seen[:, 0].astype(np.int64)
        if self.filter is not None:
            shards = self.shards(ids)
            limits = 2 * np.maximum(self.limits, 1)
            self.kernels.count(self.filter, self.filtered, limits, ids, shards, seen, shows)
            may = shows >= self.rule.admit_count
        if self.rule.admit_probability < 1:
            drawn = np.empty(len(ids), bool)
            self.kernels.lucky(self._key, ids, seen, step, self.rule.admit_probability, drawn)
            may = may & drawn
        return may, shows

    def crowded(self, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shards without room for so many new rows, and how many come to each; `shards` (n,): one for each row."""
        coming = np.bincount(shards, minlength=len(self.counts))
        crowded = np.flatnonzero(self.counts + coming > self.limits)
        return crowded, coming[crowded]

    def fits(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Which of some new rows there is room for, bool (n,): the highest of each shard."""
        order = np.lexsort((ids, -scores, shards))
        rank = np.arange(len(ids)) - np.searchsorted(shards[order], shards[order])
        fits = np.empty(len(ids), bool)
        fits[order] = rank < (self.limits - self.counts)[shards[order]]
        return fits

    # ------------------------------------------------------------ which rows leave

    def decayed(self, scores: np.ndarray, last: np.ndarray, step: int) -> np.ndarray:
        """Scores (n,) as they are at `step`."""
        out = np.empty(len(scores))
        self.kernels.decayed(scores, last, step, self.rule.score_decay, out)
        return out

    def due(self, step: int) -> np.ndarray:
        """The shard (1,) whose rows may leave in this step, unseen for long, or of low score; (0,) where none do."""
        shard = np.array([step % len(self.counts)])
        return shard[(self.counts[shard] > 0) & bool(self.rule.evict_unseen or self.rule.evict_score)]

    def overdue(self, rows: ShardRows, step: int) -> np.ndarray:
        """Which of the rows of the shard that is `due` leave, bool (n,)."""
        leaves = np.zeros(len(rows.ids), bool)
        if self.rule.evict_unseen:
            leaves |= step - rows.last.astype(np.int64) > self.rule.evict_unseen
        if self.rule.evict_score:
            leaves |= (self.decayed(rows.scores, rows.last, step) < self.rule.evict_score) & (rows.last < step)
        return leaves

    def lowest(self, shard: int, rows: ShardRows, coming: int, step: int) -> np.ndarray:
        """Indices of the rows that leave a crowded shard: the lowest ones down to 7/8 of its room, or as many more as
        those that come need, and never rows of this step.
        """
        one, out = np.zeros(1, np.int64), np.empty(len(rows.ids), np.int64)
        where = one, np.array([len(rows.ids)]), self.limits[shard : shard + 1], *rows
        return out[: self.kernels.lowest(one, np.array([coming]), *where, step, self.rule.score_decay, out)]

    def overfull(self, shard: int, here: ShardRows, come: ShardRows, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the rows of a shard and some more that are loaded, the lowest that find no room: indices of those that
        leave, and of those that do not come.
        """
        excess = len(here.ids) + len(come.ids) - int(self.limits[shard])
        keys = (
            np.concatenate([self.decayed(rows.scores, rows.last, step) for rows in (here, come)]),
            np.concatenate([here.last, come.last]),
            np.concatenate([here.ids, come.ids]),
        )
        out = lowest(keys, max(0, excess))
        return out[out < len(here.ids)], out[out >= len(here.ids)] - len(here.ids)


def first_scores(rows: np.ndarray) -> np.ndarray:
    """With which rows (n, width) begin whose scores nobody kept: that of one show, and less than another one for their
    norm, so that of such rows those of largest norm stay. The same for the same rows everywhere.
    """
    squares = np.zeros(len(rows))
    for column in rows.T:  # in this order everywhere
        squares += column.astype(np.float64) ** 2
    norms = np.sqrt(squares)
    with np.errstate(invalid="ignore"):  # what is not finite goes first
        return np.nan_to_num(1 + norms / (1 + norms), nan=1.0).astype(np.float32)


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
