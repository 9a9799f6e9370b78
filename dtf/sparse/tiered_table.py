"""A sparse table larger than memory: rows that find no room lie on disk (`sparse.disk`). Its numbers are those of a
table in memory, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dtf.api.row_optimizer import RowOptimizer
from dtf.api.row_storage import FOLDERS
from dtf.api.sparse_table import Table
from dtf.core.errors import ConfigError, io_failure
from dtf.host.devices import allow_files
from dtf.host.scratch import hold_scratch_folder
from dtf.sparse.disk import saved_rows
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.saved_rows import Part, RowsSetAside
from dtf.sparse.disk.segment import MOST_FILES
from dtf.sparse.disk.tiered_records import TieredRecords
from dtf.sparse.row_parts import DECAYED, extra_of, extras_of
from dtf.sparse.store import Rows, SparseTable, full

_SHARE = 4  # of the rows that memory holds, what is put at a time


class TieredTable(SparseTable):
    """See `SparseTable`. `memory_bytes`: of rows and their index. `hashes`: the least and the largest hash of the ids
    that come, see `owned_hashes`. Positions hold until the next call.

    Also raises SaveError where the disk is full or fails, DataError where a page is damaged. ConfigError for a folder
    that cannot be used.
    """

    def __init__(
        self,
        spec: Table,
        rule: RowOptimizer,
        seed: int,
        name: str,
        dtype: np.dtype | type,
        memory_bytes: int,
        hashes: tuple[int, int],
    ) -> None:
        self._memory_bytes, self._hashes, self._step = memory_bytes, hashes, 0
        allow_files(MOST_FILES)
        # here, as the base class makes the rows
        parent = Path(rule.disk).expanduser()
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = hold_scratch_folder(self, FOLDERS, parent) / "rows"
        except OSError as error:
            raise io_failure(error) or ConfigError(f"sparse.disk={rule.disk} cannot be used: {error}") from error
        self._tiers: TieredRecords | None = None
        super().__init__(spec, rule, seed, name, dtype)

    def clear(self) -> None:
        """Remove all rows."""
        if self._tiers is not None:
            self._tiers.close()
        states = self.stride - self.width
        values = "float64" if self.dtype == np.float64 else "bfloat16" if self._rounds else "float32"
        form = RecordFormat(self.width, states, values, self.rule.extra_bytes)
        tiers = self._tiers = TieredRecords(self._folder, form, self._memory_of_rows(), *self._hashes, name=self.name)
        self._records, self._extras = tiers.records, extras_of(self.rule)
        self._since = self._extra(DECAYED)
        self.decayed = 0.0

    @property
    def tiers(self) -> TieredRecords:
        """What holds the rows."""
        assert self._tiers is not None
        return self._tiers

    def __len__(self) -> int:
        return len(self.tiers)

    def byte_count(self) -> int:
        """Memory of the rows that are in memory, their state and the index."""
        return self.tiers.byte_count()

    def planned_bytes(self) -> int:
        return self._memory_bytes

    def about(self) -> dict[str, int]:
        tiers = self.tiers
        on_disk = sum(file.stored.size for file in tiers.run.files)
        return super().about() | {"disk_bytes": on_disk, "found": tiers.hits, "read": tiers.misses}

    def lookup(self, ids: np.ndarray, create: bool) -> np.ndarray:
        lookup = super().lookup
        if create:
            return lookup(ids, create)
        return np.concatenate([lookup(ids[some], create) for some in self._some(len(ids))])

    def update(
        self,
        ids: np.ndarray,
        gradients: np.ndarray,
        lr: float,
        factor: float,
        step: int,
        seen: np.ndarray | None = None,
    ) -> None:
        if self._since is None and self.rule.shrinkage(self.rule.rate(lr)):
            raise ConfigError(
                f"table {self.name}: {type(self.rule).__name__}.shrinkage is not 0 at this learning rate, and was 0 at "
                "the least one, so that rows on sparse.disk keep no decay; let it be 0 for all or for none, or leave "
                "sparse.disk out"
            )
        super().update(ids, gradients, lr, factor, step, seen)
        self._step += 1  # not `step`, which stands still where a step is skipped

    def read_ahead(self, ids: np.ndarray) -> None:
        self.tiers.prefetch(ids[ids != -1], self._step + 1)

    def scan(self) -> Iterator[Rows]:
        for ids, records, extra in self.tiers.scan():
            yield self.parts_of(ids, records, extra)

    def parts_of(self, ids: np.ndarray, records: np.ndarray, extra: np.ndarray) -> Rows:
        """Of records side by side (n, width + states) rows and states."""
        states = {name: records[:, columns] for name, columns in self._columns.items()}
        states = {name: values.reshape(-1) if values.shape[1] == 1 else values for name, values in states.items()}
        states |= {name: extra_of(name, extra, where) for name, where in self._extras.items()}
        return Rows(ids, records[:, : self.width], states)

    def export(self) -> Rows:
        """All rows by ascending id, as copies, in memory."""
        return joined(list(self.scan()) or [self.parts_of(*_nothing(self.tiers.form))])

    def put(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        states: dict[str, np.ndarray] | None,
        step: int = 0,
        scores: np.ndarray | None = None,
    ) -> None:
        if states and self._since is None and (since := states.get(DECAYED)) is not None:  # it no longer decays
            rows = rows * np.exp(self.decayed - since).astype(self.dtype)[:, None]
            states = {name: values for name, values in states.items() if name != DECAYED}
        for some in self._some(len(ids)):
            of = states and {name: values[some] for name, values in states.items()}
            super().put(ids[some], rows[some], of, step, None if scores is None else scores[some])

    def set_aside(self) -> RowsSetAside:
        return RowsSetAside(self.tiers)

    def load(self, parts: list[Part], beside: dict[str, slice], step: int) -> bool:
        if beside != self._extras or not saved_rows.same_layout(parts, self.tiers.form):
            return False
        saved_rows.load(self.tiers, parts)
        if not self.rule.lives and len(self) > self._capacity:
            raise full(self.name, self.spec, len(self))
        return True

    def _memory_of_rows(self) -> int:
        """Bytes of memory for rows and what finds them."""
        return self._memory_bytes

    def _some(self, count: int) -> list[slice]:
        """Parts of so many rows, at least one, each of which finds room in memory."""
        most = max(1, self.tiers.cache.capacity // _SHARE)
        return [slice(at, at + most) for at in range(0, max(1, count), most)]

    def _extra(self, name: str) -> np.ndarray | None:
        """One of `EXTRAS` (positions,), as the cache has it; None where it is not kept."""
        return extra_of(name, self.tiers.extra, self._extras[name]) if name in self._extras else None

    def _find(self, ids: np.ndarray) -> np.ndarray:
        return self.tiers.place(ids, self._step)

    def _place(self, ids: np.ndarray, draw: bool = True) -> np.ndarray:
        positions = self.tiers.place(ids, self._step)
        new = np.flatnonzero((positions < 0) & (ids != -1))
        if not len(new):
            return positions
        if len(self) + len(new) > self._capacity:
            raise full(self.name, self.spec, len(self) + len(new))
        positions[new] = self.tiers.make(ids[new])
        self._begin(ids[new], positions[new], draw)
        return positions

    def _remember_decay(self) -> None:
        """It is remembered from the first step on."""

    def _changed(self, positions: np.ndarray) -> None:
        self.tiers.changed(positions)


def joined(parts: list[Rows]) -> Rows:
    """All rows of at least one part, by ascending id."""
    ids = np.concatenate([part.ids for part in parts])
    order = np.argsort(ids)
    states = {name: np.concatenate([part.states[name] for part in parts])[order] for name in parts[0].states}
    return Rows(ids[order], np.concatenate([part.rows for part in parts])[order], states)


def _nothing(form: RecordFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(0, np.int64), np.empty((0, form.stride), form.dtype), np.empty((0, form.extra), np.uint8)
