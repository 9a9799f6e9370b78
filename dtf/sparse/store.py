"""A sparse table in one process: rows by id, made when they are first asked for, with the state of their optimizer.
Takes and returns numpy arrays, and uses no torch.

Rows lie one after another in the order in which they were made, each beside its state, so that a step reads a row with
one access to memory. An index finds them by id. Knows no ranks. U: distinct ids of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dtf.api.row_storage import Values
from dtf.core.errors import ConfigError, DataError
from dtf.core.seeding import seed_of
from dtf.sparse.changes import Changes
from dtf.sparse.id_arrays import kernels, unique
from dtf.sparse.life import SCORE
from dtf.sparse.row_index import index_of, reserve
from dtf.sparse.row_parts import DECAYED, columns_of

if TYPE_CHECKING:
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.api.sparse_table import Table
    from dtf.sparse.disk.saved_rows import Part, RowsSetAside


class Rows(NamedTuple):
    """The rows of n ids."""

    ids: np.ndarray  # (n,) int64
    rows: np.ndarray  # (n, width) as they are kept: see SparseTable.decayed
    states: dict[str, np.ndarray]  # (n, k), or (n,) where there is one number for each row


class SparseTable:
    """Rows of `spec.width` numbers, or of the columns [first, last) of `columns`, in float32 or float64.

    The ids of one call are distinct. Id -1 stands for zeros that learn nothing.

    ConfigError where numba is not installed, or there is no address space for `spec.capacity` rows.
    """

    statistics: ClassVar[dict[str, str]] = {}
    """What else an export tells of rows, and of what kind its numbers are: as `dtype.kind`."""

    decayed: float = 0.0
    """The logarithm of the weight decay of all steps so far, for optimizers that decay every row
    (`RowOptimizer.shrinkage`). A checkpoint keeps it, and it is set before `put`. Rows are multiplied when they are
    needed: the value of a row is row * exp(decayed - its own state `decayed`).
    """

    def __init__(
        self,
        spec: Table,
        rule: RowOptimizer,
        seed: int,
        name: str,
        dtype: np.dtype | type = np.float32,
        columns: tuple[int, int] | None = None,
    ) -> None:
        self._kernels = kernels()
        self.columns = columns or (0, spec.width)
        self.width = self.columns[1] - self.columns[0]
        self.spec, self.rule, self.name, self.dtype = spec, rule, name, np.dtype(dtype)
        self._seed, self._key = seed, np.uint64(seed_of(seed, "table", name))
        self._columns = columns_of(rule, self.width)
        self._firsts = {state: first for state, (_, first) in rule.states(self.width).items()}
        self.stride = max([self.width, *(columns.stop for columns in self._columns.values())])
        self._rounds = rule.values is Values.bf16
        self._capacity = spec.most_rows
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        try:
            self._index = index_of(self.spec, self._kernels)
            self._records = reserve(self._positions(), self.stride, self.dtype)
        except (OSError, ValueError, OverflowError) as error:
            each = ", one for each id," if 0 < self.spec.size <= self.spec.capacity else ""
            raise ConfigError(
                f"table {self.name}: this host has no room for capacity={self.spec.capacity} rows{each} of "
                f"{self.stride} numbers with their state: {error}; set a smaller {self.spec.capacity_key}"
            ) from error
        self._since: np.ndarray | None = None  # (capacity,) `decayed` when the row was last multiplied; None: never
        self._count, self.decayed = 0, 0.0
        self._changes: Changes | None = None  # nobody asks

    def __len__(self) -> int:
        return self._count

    def byte_count(self) -> int:
        """Memory of the rows, their state and the index."""
        since = 0 if self._since is None else len(self) * self._since.itemsize
        return len(self) * self._records.shape[1] * self._records.itemsize + since + self._index.slots.nbytes

    def planned_bytes(self) -> int:
        """`byte_count`, or what it is known to grow to."""
        return self.byte_count()

    def about(self) -> dict[str, int]:
        """What `job=status` shows of it."""
        return {"rows": len(self), "bytes": self.byte_count(), "capacity": self.spec.capacity}

    def lookup(self, ids: np.ndarray, create: bool) -> np.ndarray:
        """Rows (U, width) of distinct ids (U,). A row that does not exist is drawn, and kept only if `create`.

        DataError for an id that the table cannot have, ConfigError when the table is full. The table is unchanged then.
        """
        ids = self._checked(ids)
        positions = self._place(ids) if create else self._find(ids)
        rows = np.empty((len(ids), self.width), self.dtype)
        self._kernels.read(self._records, positions, rows)
        if self._since is not None:
            rows *= np.exp(self.decayed - self._since[positions]).astype(self.dtype)[:, None]  # of no row: zeros
        if not create:
            absent = np.flatnonzero((positions < 0) & (ids != -1))
            rows[absent] = self._draw(ids[absent])
        return rows

    def update(
        self,
        ids: np.ndarray,
        gradients: np.ndarray,
        lr: float,
        factor: float,
        step: int,
        seen: np.ndarray | None = None,
    ) -> None:
        """One step of the optimizer on the rows of distinct ids (U,), with gradients (U, width) multiplied by `factor`.
        No other row changes.

        `lr`: that of the schedule. `step`: see RowOptimizer. `seen` (U, 2): how often each id was shown in this step,
        and clicked, for tables whose rows have a life. To be called every step, also without ids, since weight decay
        may act on all rows. Errors as of `lookup`; where rows have a life the table is of no use afterwards.
        """
        ids, gradients = self._checked(ids), np.ascontiguousarray(gradients, self.dtype)
        if gradients.shape != (len(ids), self.width):
            raise ValueError(f"gradients {gradients.shape} of {len(ids)} rows of {self.width} numbers")
        lr = self.rule.rate(lr)
        shrinkage = self.rule.shrinkage(lr)
        positions = self._learning(ids, seen, step)
        if shrinkage:
            self._remember_decay()
        self.decayed += shrinkage
        self._catch_up(positions)
        self.rule.step(self._records, positions, gradients, factor, lr, step)
        self._changed(positions)

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids (U,) have a row, bool (U,)."""
        return self._find(self._checked(ids)) >= 0

    def records(self, ids: np.ndarray) -> np.ndarray:
        """Rows with their state side by side (U, width + states), as copies. `ids` (U,) are distinct; rows that do not
        exist are made. Errors as of `lookup`.
        """
        positions = self._place(self._checked(ids))
        self._catch_up(positions)
        self._changed(positions)
        return self._records[positions]

    def keep(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Add the `records` of distinct ids that are not in the table. Errors as of `lookup`."""
        positions = self._place(self._checked(ids), draw=False)
        self._records[positions] = records
        self._changed(positions)

    def add(self, ids: np.ndarray, differences: np.ndarray) -> None:
        """Add `differences` (U, width + states) to the rows and states of distinct ids (U,). Rows that do not exist are
        made. Errors as of `lookup`.
        """
        positions = self._place(self._checked(ids))
        self._catch_up(positions)
        self._records[positions] += differences
        self._changed(positions)

    def _catch_up(self, positions: np.ndarray) -> None:
        """Apply to rows the decay that they have not had yet."""
        if self._since is not None:
            from dtf.sparse.row_kernels import shrink

            shrink(self._records, self.width, positions, self._since, self.decayed)

    def export(self) -> Rows:
        """All rows of the table by ascending id, as copies."""
        return self._rows_at(*self._index.items())

    def scan(self) -> Iterator[Rows]:
        """All rows, some at a time, as copies. No other method may be called meanwhile."""
        yield self.export()

    def keep_changes(self) -> None:
        """From now on keep track of the rows that change and the ids that leave, until rows are removed by `clear`."""
        self._changes = Changes(len(self._records))

    def change_counts(self) -> tuple[int, int]:
        """How many rows and ids `changes` would return."""
        assert self._changes is not None
        return self._changes.count(), len(self._left())

    def changes(self) -> tuple[Rows, np.ndarray]:
        """The rows that changed since `keep_changes` was called, by ascending id, as copies, and the ids (n,) that left
        since then and are not back.
        """
        assert self._changes is not None
        return self._rows_at(*self._index.items(self._changes.flags)), self._left()

    def _left(self) -> np.ndarray:
        assert self._changes is not None
        left = self._changes.left()
        return left[self._index.find(left)[0] < 0]

    def _rows_at(self, ids: np.ndarray, positions: np.ndarray) -> Rows:
        states = {name: self._records[positions, columns] for name, columns in self._columns.items()}
        states = {name: values.reshape(-1) if values.shape[1] == 1 else values for name, values in states.items()}
        if self._since is not None:
            states[DECAYED] = self._since[positions]
        return Rows(ids, self._records[positions, : self.width], states | self._statistics(positions))

    def put(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        states: dict[str, np.ndarray] | None,
        step: int = 0,
        scores: np.ndarray | None = None,
    ) -> None:
        """Add rows and states of distinct ids (n,), as `export` returned them: any part of them, in any order, each
        once. Errors as of `lookup`.

        `states=None`: the states of rows that no step has touched. `step`: how many came before. `scores` (n,): those
        to begin with, where `states` has none and the table keeps some; None: what the rows say. DataError where the
        states are those of another optimizer, or the arrays are not what an export returns. The table is unchanged
        then.
        """
        if states is None:
            states = {k: np.full((len(ids), at.stop - at.start), self._firsts[k]) for k, at in self._columns.items()}
        if scores is not None:
            states = states | {SCORE: scores}
        if states.keys() - {DECAYED, *self.statistics} != self._columns.keys():
            raise DataError(
                f"table {self.name}: states {_listed(states)} are not those of its row optimizer, "
                f"{_listed(self._columns)}; choose the same sparse="
            )
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise DataError(f"table {self.name}: ids are {ids.dtype} {ids.shape}, not 64-bit integers in a row")
        widths = (
            {"rows": self.width}
            | dict.fromkeys((DECAYED, *self.statistics), 1)
            | {name: columns.stop - columns.start for name, columns in self._columns.items()}
        )
        for name, values in {"rows": rows, **states}.items():
            if (
                values.dtype.kind != self.statistics.get(name, "f")
                or values.shape[:1] != ids.shape
                or values.size != len(ids) * widths[name]
            ):
                raise DataError(
                    f"table {self.name}: {name} are {values.dtype} {values.shape}, not {widths[name]} real numbers "
                    f"for each of {len(ids)} ids"
                )
        ids = self._checked(ids)
        if len(unique(ids)[0]) < len(ids) or (self._find(ids) >= 0).any() or (ids == -1).any():
            raise DataError(f"table {self.name}: an id is there twice, or is -1")
        if DECAYED in states or self.decayed:
            self._remember_decay()
        ids, rows, states, positions = self._arrive(ids, rows, states, step)
        self._records[positions, : self.width] = rows.reshape(len(ids), self.width)
        for name, columns in self._columns.items():
            self._records[positions, columns] = states[name].reshape(len(ids), columns.stop - columns.start)
        if self._since is not None:
            self._since[positions] = states.get(DECAYED, self.decayed)
        self._changed(positions)

    # ------------------------------------------------------------ what tables do otherwise that lie on disk

    def read_ahead(self, ids: np.ndarray) -> None:
        """Begin to read the rows of distinct ids that the next step needs."""

    def set_aside(self) -> RowsSetAside | None:
        """All rows as they are now, in files. None: `export` has all. OSError where the disk is full or fails."""
        return None

    def load(self, parts: list[Part], beside: dict[str, slice], step: int) -> bool:
        """Fill an empty table with its range of what `set_aside` wrote `step` steps after the first, as it lies, with
        these bytes `beside` records. False: nothing is loaded, as other records were kept. DataError for damage.
        """
        return False

    def _changed(self, positions: np.ndarray) -> None:
        """Called when the rows or states at `positions` (U,) have other numbers, or are new; -1 is passed over."""
        if self._rounds:
            self._kernels.round_rows(self._records.view(np.uint32), self.width, positions)
        if self._changes is not None:
            self._changes.mark(positions)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        ids = np.ascontiguousarray(ids, np.int64)
        if self.spec.size and len(ids):
            least, most = int(ids.min()), int(ids.max())
            if least < -1 or most >= self.spec.size:
                wrong = least if least < -1 else most
                raise DataError(f"table {self.name}: id {wrong} must be 0 to {self.spec.size - 1}, or -1 for none")
        return ids

    def _find(self, ids: np.ndarray) -> np.ndarray:
        """Positions (U,) of ids, -1 where there is no row."""
        return self._index.find(ids)[0]

    def _place(self, ids: np.ndarray, draw: bool = True) -> np.ndarray:
        """Positions (U,) of ids. Rows that do not exist are made."""
        positions, absent = self._index.find(ids)
        if not absent:
            return positions
        first, last = self._count, self._count + absent
        if last > self._capacity:
            raise full(self.name, self.spec, last)
        new = np.flatnonzero((positions < 0) & (ids != -1))
        fresh = ids[new]
        positions[new] = np.arange(first, last)
        self._index.insert(fresh, positions[new])
        self._count = last
        self._begin(fresh, positions[new], draw)
        return positions

    def _begin(self, ids: np.ndarray, positions: np.ndarray, draw: bool = True) -> None:
        """Give new rows, which are zeros, their first numbers; with `draw` off, those that are not the caller's."""
        if draw:
            self._records[positions, : self.width] = self._draw(ids)
            for name, columns in self._columns.items():
                if self._firsts[name]:
                    self._records[positions, columns] = self._firsts[name]
        if self._since is not None:
            self._since[positions] = self.decayed
        self._changed(positions)

    # ------------------------------------------------------------ what tables do otherwise whose rows have a life

    def _positions(self) -> int:
        """How many positions rows may have."""
        return self._capacity

    def _learning(self, ids: np.ndarray, seen: np.ndarray | None, step: int) -> np.ndarray:
        """Positions (U,) of the ids of a step, -1 for those that learn nothing."""
        return self._place(ids)

    def _statistics(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """What else an export tells of rows."""
        return {}

    def _arrive(
        self, ids: np.ndarray, rows: np.ndarray, states: dict[str, np.ndarray], step: int
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """Of the rows of a checkpoint those that are kept, and their positions."""
        return ids, rows, states, self._place(ids, draw=False)

    def _draw(self, ids: np.ndarray) -> np.ndarray:
        """The rows of ids as they are before any step."""
        rows = np.zeros((len(ids), self.spec.width), self.dtype)
        if self.spec.scale and len(ids):
            self._kernels.draw(self._key, ids, self.spec.scale, rows)
            if self.decayed:
                rows *= self.dtype.type(np.exp(self.decayed))
            if self._rounds:
                self._kernels.round_rows(rows.view(np.uint32), rows.shape[1], np.arange(len(rows)))
        return rows[:, slice(*self.columns)]

    def _remember_decay(self) -> None:
        """From now on keep the decay of each row. So far it is the same for all."""
        if self._since is None:
            self._since = reserve(len(self._records), 1, np.dtype(np.float64)).reshape(-1)
            self._since[self._index.items()[1]] = self.decayed


def full(name: str, spec: Table, rows: int) -> ConfigError:
    """The ConfigError for more rows than a table may hold."""
    return ConfigError(
        f"table {name} is full: capacity={spec.capacity} rows, {rows} are wanted; go on in this run.dir with sparse."
        f"when_full=evict or refuse, or in a new one with checkpoint.resume=OLD and a larger "
        f"{spec.capacity_key}"
    )


def _listed(names: Any) -> str:
    return f"[{', '.join(sorted(names))}]"
