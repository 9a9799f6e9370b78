"""Sparse tables of a trained model, which are read and never learn: for evaluations, predictions and exports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dtf.api.row_optimizer import RowOptimizer
from dtf.api.task import Weights
from dtf.sparse.row_layers import look_up
from dtf.sparse.row_optimizers import RowSgd
from dtf.sparse.row_parts import DECAYED, extra_of
from dtf.sparse.store import Rows, SparseTable
from dtf.sparse.table_checkpoints import DECAY

if TYPE_CHECKING:
    from dtf.sparse.disk.row_files import FileLayer
    from dtf.sparse.disk.saved_rows import Part


class FrozenRows(RowSgd):
    """The rule of rows that no step changes: they have no state, and number format and weight decay of the run."""


def frozen(rule: RowOptimizer, weights: Weights) -> FrozenRows:
    """As `rule` keeps rows, for those of `weights`."""
    source = weights.source()
    decays = source is not None and any(name.endswith(f"/{DECAY}") for name in source.names())
    kept = {"values": rule.values, "disk": rule.disk, "memory_gb": rule.memory_gb, "score_decay": rule.score_decay}
    return FrozenRows(weight_decay=float(decays), **kept)


class StoredTable(SparseTable):
    """See `SparseTable`. Rows that lay on disk stay in the files of their checkpoint, and pages are read when their
    rows are asked for; others are in memory. `len` counts those in memory.
    """

    _parts: list[Part]
    _beside: dict[str, slice]
    _layers: list[FileLayer]

    def clear(self) -> None:
        super().clear()
        self._parts, self._beside, self._layers = [], {}, []

    def load(self, parts: list[Part], beside: dict[str, slice], step: int) -> bool:
        from dtf.sparse.disk.row_files import layers_of
        from dtf.sparse.disk.segment import layout_of

        files = (file for part in parts for file in (*part.segments, *part.changed))
        if self._rounds and not all(layout_of(*file).narrow for file in files):
            return False  # rows are rounded as they are put
        self._parts, self._beside = parts, beside
        self._layers, _ = layers_of(parts, slice(*self.columns), beside.get(DECAYED), {})
        return True

    def lookup(self, ids: np.ndarray, create: bool) -> np.ndarray:
        rows, found = self._stored(ids)
        rows[~found] = super().lookup(ids[~found], create=False)
        return rows

    def has(self, ids: np.ndarray) -> np.ndarray:
        return self._stored(ids)[1] | super().has(ids)

    def scan(self) -> Iterator[Rows]:
        from dtf.sparse.disk.saved_rows import rows_of

        for _, ids, records, extra in (batch for part in self._parts for batch in rows_of(part)):
            states = {key: extra_of(key, extra, where) for key, where in self._beside.items()}
            yield Rows(ids, records[:, slice(*self.columns)].astype(self.dtype, copy=False), states)
        if not self._parts:
            yield super().export()

    def export(self) -> Rows:
        from dtf.sparse.tiered_table import joined

        return joined(list(self.scan()) or [super().export()])

    def _stored(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (U, width) of those of distinct ids (U,) that have one in files, and which these are, bool (U,)."""
        rows, found = np.empty((len(ids), self.width), self.dtype), np.zeros(len(ids), bool)
        look_up(self._layers, self._checked(ids), self.decayed, rows, found)
        return rows, found
