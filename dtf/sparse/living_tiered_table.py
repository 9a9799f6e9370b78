"""A sparse table larger than memory whose rows have a life: what decides which rows leave lies beside each row.

A shard is one range of hashes, so its rows lie together: those that may leave are read one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dtf.core.errors import ConfigError
from dtf.sparse.disk.saved_rows import Part
from dtf.sparse.disk.segment import BATCH_BYTES
from dtf.sparse.life import LAST_STEP, SCORE, Life, ShardRows
from dtf.sparse.living_table import LivingTable
from dtf.sparse.row_parts import extra_of
from dtf.sparse.tiered_table import TieredTable


class LivingTieredTable(LivingTable, TieredTable):
    """See `TieredTable`, `LivingTable` and `Life`. Rows that leave are given by their ids."""

    def clear(self) -> None:
        self.life = Life(self.spec, self.rule, self._seed, self.name)
        super().clear()
        self._last, self._scores = (extra_of(key, self.tiers.extra, self._extras[key]) for key in (LAST_STEP, SCORE))

    def by_shard(self) -> dict[str, np.ndarray]:
        """See `LivingTable.by_shard`. With the rows of each, so that nobody has to count them."""
        return super().by_shard() | {f"life/rows_{len(self.life.counts)}": self.life.counts}

    def load(self, parts: list[Part], beside: dict[str, slice], step: int) -> bool:
        """See `SparseTable.load`. Where shards have less room than they had, their lowest rows leave."""
        life = self.life
        if not super().load(parts, beside, step):
            life.counts[:] = 0
            return False
        if len(self) != len(self.tiers):  # they were counted by other shards
            life.counts[:] = 0
            for ids, *_ in self.tiers.scan():
                life.counts += np.bincount(life.shards(ids), minlength=len(life.counts))
        overfull = self._rows_of(np.flatnonzero(life.counts > life.limits))
        self._leave(_ids(ids[life.overfull(shard, rows, _joined([]), step)[0]] for shard, ids, rows in overfull))
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

    def _rows_of(self, shards: np.ndarray) -> Iterator[tuple[int, np.ndarray, ShardRows]]:
        """See `LivingTable._rows_of`: the ids of rows. Other shards between are read along where they are less than
        what is read at a time.
        """
        hashes = self.life.hashes
        between = (np.diff(shards) - 1) * int(self.life.limits.max()) * self.tiers.form.size
        for group in np.split(shards, 1 + np.flatnonzero(between > BATCH_BYTES)) if len(shards) else ():
            rest, parts = group.tolist(), list[ShardRows]()
            for ids, _, extra in self.tiers.scan(hashes(rest[0])[0], hashes(rest[-1])[1]):
                score, last = (extra_of(key, extra, self._extras[key]) for key in (SCORE, LAST_STEP))
                of, rows = self.life.shards(ids), ShardRows(ids, score, last)
                while rest and len(of) and rest[0] < of[-1]:
                    whole = _joined([*parts, _within(rows, *np.searchsorted(of, [rest[0], rest[0] + 1]))])
                    yield rest[0], whole.ids, whole
                    rest, parts = rest[1:], []
                if rest:
                    parts.append(_within(rows, int(np.searchsorted(of, rest[0])), len(of)))
            for shard in rest:
                whole, parts = _joined(parts), []
                yield shard, whole.ids, whole

    def _show(self, positions: np.ndarray, seen: np.ndarray, step: int) -> None:
        self.life.kernels.show(positions, seen, step, self.rule.score_decay, self._scores, self._last)
        self.tiers.changed(np.where(seen[:, 0] > 0, positions, -1))  # before shards are read

    def _overdue(self, step: int) -> np.ndarray:
        return _ids(ids[self.life.overdue(rows, step)] for _, ids, rows in self._rows_of(self.life.due(step)))

    def _lowest(self, shards: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        new = dict(zip(shards.tolist(), coming.tolist(), strict=True))
        found = self._rows_of(shards)
        return _ids(ids[self.life.lowest(shard, rows, new[shard], step)] for shard, ids, rows in found)

    def _settle(self, ids: np.ndarray, shards: np.ndarray, scores: np.ndarray, last: np.ndarray | int) -> np.ndarray:
        made = self.tiers.make(ids)
        self.life.counts += np.bincount(shards, minlength=len(self.life.counts))
        self._scores[made], self._last[made] = scores, last
        return made

    def _leave(self, gone: np.ndarray) -> None:
        for some in self._some(len(gone)) if len(gone) else ():
            self.tiers.remove(gone[some])
            self.life.evicted += len(gone[some])
            self.life.counts -= np.bincount(self.life.shards(gone[some]), minlength=len(self.life.counts))


def _within(rows: ShardRows, first: int, last: int) -> ShardRows:
    return ShardRows(*(array[first:last] for array in rows))


def _joined(parts: list[ShardRows]) -> ShardRows:
    none = ShardRows(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32))
    return ShardRows(*(np.concatenate(arrays) for arrays in zip(none, *parts, strict=True)))


def _ids(found: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *found])
