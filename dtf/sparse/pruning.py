"""Which rows of a sparse table go along with a model that is exported: those of high score, or of large norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtf.api.task import Source
from dtf.core.errors import ConfigError
from dtf.sparse.life import LAST_STEP, SCORE
from dtf.sparse.row_parts import DECAYED
from dtf.sparse.store import Rows, SparseTable
from dtf.sparse.table_checkpoints import steps_of


@dataclass(frozen=True)
class Pruning:
    """The rule. `min_score`: a row of less stays out. `max_rows`: the most of each table; 0: no limit."""

    min_score: float = 0.0
    max_rows: int = 0

    def __bool__(self) -> bool:
        return self.min_score > 0 or self.max_rows > 0

    def kept(self, store: SparseTable, source: Source | None) -> np.ndarray:
        """The ids (n,) of the rows of a table that go along, ascending. `source`: the checkpoint, where it has scores.

        With scores those of the highest, as they are at the step of the checkpoint; without them those of the largest
        norm, as evaluation sees them. Of equals those of the smaller ids. Looks at some rows at a time. ConfigError for
        `min_score` without scores.
        """
        best, held = [(np.empty(0, np.int64), np.empty(0))], 0
        for some in store.scan():
            worth = self._worth(store, some, source)
            high = worth >= self.min_score if self.min_score else np.ones(len(worth), bool)
            best.append((some.ids[high], worth[high]))
            held += len(best[-1][0])
            if held > 2 * self.max_rows > 0:
                best = [self._best(best)]
                held = self.max_rows
        return np.sort(self._best(best)[0])

    def _worth(self, store: SparseTable, some: Rows, source: Source | None) -> np.ndarray:
        if source is not None and SCORE in some.states:
            from dtf.sparse.life_kernels import decayed

            worth = np.empty(len(some.ids))
            decayed(some.states[SCORE], some.states[LAST_STEP], steps_of(source), store.rule.score_decay, worth)
            return worth
        if self.min_score > 0:
            raise ConfigError(
                f"job.min_score={self.min_score:g}: the run kept no scores of the rows of table {store.name}; use "
                "job.max_rows=N, which keeps those of largest norm, or train with sparse.when_full=evict"
            )
        since = some.states.get(DECAYED)
        decay = 1 if since is None else np.exp(store.decayed - since).astype(store.dtype)[:, None]
        return np.linalg.norm(some.rows * decay, axis=1)

    def _best(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """The highest of ids (n,) and what they are worth (n,)."""
        ids, worth = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        best = np.lexsort((ids, -worth))[: self.max_rows] if 0 < self.max_rows < len(ids) else slice(None)
        return ids[best], worth[best]
