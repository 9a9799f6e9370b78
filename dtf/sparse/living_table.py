"""A sparse table whose rows have a life: ids are admitted, rows leave, and a full table goes on (`RowLife`).

Rows are made by `update`, not by `lookup`: an id without a row reads as it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from dtf.api.row_optimizer import RowOptimizer
from dtf.sparse.life import LAST_STEP, SCORE, Life, ShardRows, first_scores
from dtf.sparse.placed_life import PlacedLife
from dtf.sparse.row_parts import DECAYED
from dtf.sparse.store import SparseTable


def table_class(rule: RowOptimizer) -> type[SparseTable]:
    """Of tables in memory whose rows learn by `rule`: one whose rows have a life where it says so."""
    return LivingTable if rule.lives else SparseTable


class LivingTable(SparseTable):
    """See `SparseTable`, and `Life` for what is decided here."""

    statistics: ClassVar[dict[str, str]] = {LAST_STEP: "i", SCORE: "f"}
    life: Life
    _places: PlacedLife

    def __len__(self) -> int:
        return len(self.life)

    def byte_count(self) -> int:
        return super().byte_count() + self.life.byte_count()

    def about(self) -> dict[str, int]:
        return super().about() | {key: getattr(self.life, key) for key in ("admitted", "refused", "evicted")}

    def lookup(self, ids: np.ndarray, create: bool) -> np.ndarray:
        """Rows (U, width) of distinct ids (U,), those that do not exist as they are drawn; none is made."""
        return super().lookup(ids, create=False)

    def by_shard(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of each shard, (shards, ...) by name."""
        return self.life.by_shard()

    def _positions(self) -> int:
        self.life = self._places = PlacedLife(self.spec, self.rule, self._seed, self.name)
        return int(self._places.starts[-1])

    def _statistics(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        return self._places.statistics(positions)

    def _learning(self, ids: np.ndarray, seen: np.ndarray | None, step: int) -> np.ndarray:
        """Positions (U,) of the ids that learn in this step, -1 for others: rows leave, and are made."""
        if seen is None:
            raise ValueError(f"table {self.name}: rows have a life, and nothing says how often ids were shown")
        life, shown = self.life, seen[:, 0] > 0
        positions = self._find(ids)
        self._show(positions, seen, step)
        gone = life.evicted
        self._leave(self._overdue(step))
        new = np.flatnonzero((positions < 0) & (ids != -1) & shown)
        may, shows = life.admit(ids[new], seen[new], step)
        asking, new, shows = len(new), new[may], shows[may]
        scores, shards = shows + seen[new, 1], life.shards(ids[new])
        crowded, coming = life.crowded(shards)
        if len(crowded):
            if self.rule.evicts_when_full:
                self._leave(self._lowest(crowded, coming, step))
            if len(life.crowded(shards)[0]):
                fits = life.fits(ids[new], shards, scores)
                new, scores, shards = new[fits], scores[fits], shards[fits]
        life.refused += asking - len(new)
        life.admitted += len(new)
        if life.evicted > gone:  # others took their places
            positions = self._find(ids)
        positions[new] = self._settle(ids[new], shards, scores, step)
        self._begin(ids[new], positions[new])
        positions[~shown] = -1
        return positions

    def _arrive(
        self, ids: np.ndarray, rows: np.ndarray, states: dict[str, np.ndarray], step: int
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """Rows without statistics count as shown before `step`, see `first_scores`. The lowest of those that find no
        room stay out, or leave: what remains does not depend on the order in which rows arrive.
        """
        life = self.life
        if SCORE not in states:
            now = np.exp(self.decayed - states[DECAYED])[:, None] if DECAYED in states else 1
            states = states | {SCORE: first_scores(rows * now)}
        states = {LAST_STEP: np.full(len(ids), step, np.int32)} | states
        scores, last = states[SCORE].reshape(-1), states[LAST_STEP].reshape(-1)
        shards, rest = life.shards(ids), np.ones(len(ids), bool)
        gone = [np.empty(0, np.int64)]
        for shard, handles, here in self._rows_of(life.crowded(shards)[0]):
            mine = np.flatnonzero(shards == shard)
            leave, out = life.overfull(shard, here, ShardRows(ids[mine], scores[mine], last[mine]), step)
            gone.append(handles[leave])
            rest[mine[out]] = False
            life.evicted += len(out)
        self._leave(np.concatenate(gone))
        ids, rows, states = ids[rest], rows[rest], {name: values[rest] for name, values in states.items()}
        return ids, rows, states, self._settle(ids, shards[rest], scores[rest], last[rest])

    # ------------------------------------------------------------ where rows lie

    def _show(self, positions: np.ndarray, seen: np.ndarray, step: int) -> None:
        """Count that rows were shown and clicked, `seen` (U, 2); -1 stands for no row."""
        self._places.show(positions, seen, step)

    def _overdue(self, step: int) -> np.ndarray:
        """Rows that leave in this step, see `Life.overdue`."""
        return self._places.overdue_at(step)

    def _lowest(self, shards: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        """Rows that leave crowded shards for `coming` new ones of each, see `Life.lowest`."""
        return self._places.lowest_at(shards, coming, step)

    def _rows_of(self, shards: np.ndarray) -> Iterator[tuple[int, np.ndarray, ShardRows]]:
        """Each of some ascending shards, what `_leave` takes for each of its rows, and what is known of these."""
        return self._places.rows_of(shards)

    def _settle(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray, last: np.ndarray | int) -> np.ndarray:
        """Positions (n,) of new rows, which are zeros, with their statistics."""
        made = self._places.settle(ids, shards, scores, last)
        self._index.insert(ids, made)
        self._records[made] = 0
        return made

    def _leave(self, gone: np.ndarray) -> None:
        """Let rows go, see `PlacedLife.leave`."""
        if not len(gone):
            return
        self.life.evicted += len(gone)
        left = self._places.ids[gone]
        self._index.remove(left)
        if self._changes is not None:
            self._changes.leave(left, gone)
        were, are = self._places.leave(gone)
        self._index.move(self._places.ids[are], are)
        self._records[are] = self._records[were]
        if self._since is not None:
            self._since[are] = self._since[were]
        if self._changes is not None:
            self._changes.move(were, are)
