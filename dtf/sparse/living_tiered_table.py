"""A sparse table larger than memory whose rows have a life: what decides which rows leave lies beside each row.

A shard is one range of hashes, so its rows lie together: those that may leave are read one after another.
"""

from __future__ import annotations

import numpy as np

from dtf.core.errors import ConfigError
from dtf.sparse.disk.saved_rows import Part
from dtf.sparse.life import LAST_STEP, SCORE, Life, ShardRows
from dtf.sparse.living_table import LivingTable
from dtf.sparse.store import extra_of
from dtf.sparse.tiered_table import TieredTable


class LivingTieredTable(LivingTable, TieredTable):
    """See `TieredTable`, `LivingTable` and `Life`. Rows that leave are given by their ids."""

    def clear(self) -> None:
        self.life = Life(self.spec, self.rule, self._seed, self.name)
        super().clear()
        self._last, self._scores = self._extra(LAST_STEP), self._extra(SCORE)

    def by_shard(self) -> dict[str, np.ndarray]:
        """See `LivingTable.by_shard`. With the rows of each, so that nobody has to count them."""
        return super().by_shard() | {f"life/rows_{len(self.life.counts)}": self.life.counts}

    def scores(self, ids: np.ndarray, step: int) -> np.ndarray:
        found = [np.zeros(0)]
        for some in self._some(len(ids)):
            positions = self._find(ids[some])
            if self._scores is None or self._last is None:
                found.append(np.zeros(len(positions)))
            else:
                found.append(self.life.decayed(self._scores[positions], self._last[positions], step))
        return np.concatenate(found)

    def load(self, parts: list[Part], step: int) -> bool:
        """See `SparseTable.load`. Where shards have less room than they had, their lowest rows leave."""
        life = self.life
        if not super().load(parts, step):
            life.counts[:] = 0
            return False
        if life.counts.sum() != len(self):
            life.counts[:] = 0
            for ids, *_ in self.tiers.scan():
                life.counts += np.bincount(life.shards(ids), minlength=len(life.counts))
        for shard in np.flatnonzero(life.counts > life.limits).tolist():
            self._leave(self._overfull(shard, _rows([]), step)[0])
        return True

    def _memory_of_rows(self) -> int:
        """The filter counts too, by the part of its shards that is here."""
        low, high = self._hashes
        beside, memory = self.life.byte_count() * (high - low + 1) >> 64, super()._memory_of_rows()
        if beside >= memory // 2:
            raise ConfigError(
                f"table {self.name}: the filter of sparse.admit_count={self.rule.admit_count} takes "
                f"{beside / 1e9:.3g} GB of the {memory / 1e9:.3g} GB of sparse.memory_gb that this table has here, and "
                "more than half; give more, set a smaller capacity, or use sparse.admit_probability, which takes none"
            )
        return memory - beside

    # ------------------------------------------------------------ where rows lie

    def _rows_of(self, shard: int) -> ShardRows:
        found = []
        for ids, _, extra in self.tiers.scan(*self.life.hashes(shard)):
            if self._extras:
                kept = [extra_of(name, extra, self._extras[name]) for name in (SCORE, LAST_STEP)]
            else:
                kept = [np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)]
            found.append(ShardRows(ids, *kept))
        return _rows(found)

    def _show(self, positions: np.ndarray, seen: np.ndarray, step: int) -> None:
        if self._scores is not None:
            self.life.kernels.show(positions, seen, step, self.rule.score_decay, self._scores, self._last)
            self.tiers.changed(np.where(seen[:, 0] > 0, positions, -1))  # before shards are read

    def _overdue(self, step: int) -> np.ndarray:
        shard = self.life.due(step)
        if shard is None:
            return np.empty(0, np.int64)
        rows = self._rows_of(shard)
        return rows.ids[self.life.overdue(rows, step)]

    def _lowest(self, shards: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        gone = [np.empty(0, np.int64)]
        for shard, new in zip(shards.tolist(), coming.tolist(), strict=True):
            rows = self._rows_of(shard)
            gone.append(rows.ids[self.life.lowest(shard, rows, new, step)])
        return np.concatenate(gone)

    def _overfull(self, shard: int, come: ShardRows, step: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows_of(shard)
        leave, out = self.life.overfull(shard, rows, come, step)
        return rows.ids[leave], out

    def _settle(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray, last: np.ndarray | int) -> np.ndarray:
        made = self.tiers.make(ids)
        self.life.counts += np.bincount(shards, minlength=len(self.life.counts))
        if self._scores is not None and self._last is not None:
            self._scores[made], self._last[made] = scores, last
        return made

    def _leave(self, gone: np.ndarray) -> None:
        if not len(gone):
            return
        self.life.evicted += len(gone)
        self.life.counts -= np.bincount(self.life.shards(gone), minlength=len(self.life.counts))
        for some in self._some(len(gone)):
            self.tiers.remove(gone[some])


def _rows(parts: list[ShardRows]) -> ShardRows:
    none = ShardRows(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32))
    return ShardRows(*(np.concatenate(arrays) for arrays in zip(none, *parts, strict=True)))
