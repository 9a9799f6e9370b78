"""The sparse tables of a run over its ranks: rows take the place of ids before a step, gradients go to whoever holds
the rows after it.

A table lies in host memory. Here rows are found and gradients summed by id; how a table keeps and updates its rows is
`dtf.sparse.store`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtf.api.recipe import Recipe
from dtf.api.strategy import Source, Weights
from dtf.core.errors import ConfigError, DataError
from dtf.core.seeding import mix
from dtf.core.types import Batch, Box
from dtf.distributed.sharding import bounds
from dtf.distributed.world import World
from dtf.sparse.store import DECAYED, SparseTable, full, gather, segment_sum, squares, unique

COUNT, DECAY = "count", "decay"
"""In a checkpoint: rows over all ranks; `SparseTable.decayed`."""

PIECE = 1 << 18
"""Rows of a table that are read from a checkpoint at once."""


class ShardedTables:
    """One step is `look` for training, `give`, `step`; in between `norm` is that of the gradient of all rows, over all
    ranks.

    All but `norm` and `byte_count` are collective.
    """

    def __init__(self, tables: Mapping[str, ShardedTable], world: World, share: float) -> None:
        self._tables, self._world, self._share = tables, world, share
        # ids that are there, and which of them each position had, -1 for none
        self._asked: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.norm = torch.zeros((), dtype=torch.float64)

    def look(self, batch: Batch, train: bool) -> Batch:
        """The batch with rows (B, F, width) in place of ids (B, F). Evaluation makes no new rows."""
        inputs = dict(batch.inputs)
        for name, table in self._tables.items():
            inputs[name] = self._rows(name, table, batch.inputs[name], train)
        return batch._replace(inputs=inputs)

    def give(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients (B, F, width) of what `look` gave for training; only names of inputs that this rank
        has.
        """
        total = torch.zeros(1 + len(self._tables), dtype=torch.float64)  # squares of the gradient, rows of each table
        for name, table in self._tables.items():
            ids, inverse = self._asked.pop(name)
            if name in gradients:
                flat = (
                    gradients[name]
                    .detach()
                    .cpu()
                    .numpy()
                    .reshape(-1, table.width)
                    .astype(table.store.dtype, copy=False)
                )
                summed = segment_sum(flat, inverse, len(ids))
                summed[ids < 0] = 0
            else:
                summed = np.zeros((len(ids), table.width), table.store.dtype)
            total[0] += table.merge(summed)
        total[1:] = torch.tensor([len(table.store) for table in self._tables.values()])
        if any(table.by_rows or table.by_columns for table in self._tables.values()):
            self._world.reduce(total)
        for (name, table), rows in zip(self._tables.items(), total[1:].tolist(), strict=True):
            if table.by_rows and rows > table.store.spec.capacity:
                raise full(name, table.store.spec.capacity, int(rows))
        self.norm = total[0].sqrt() * self._share

    def step(self, factor: float, lr: float, step: int) -> None:
        """One step of the rows that were looked up; their gradients times `factor`."""
        for table in self._tables.values():
            table.apply(factor * self._share, lr, step)

    def boxes(self) -> list[Box]:
        """This rank's part of the tables for a checkpoint."""
        return [box for name, table in self._tables.items() for box in _boxes(name, table, self._world)]

    def load(self, source: Source, resume: bool = True) -> None:
        """Take this rank's part from a checkpoint; without `resume` the rows alone, as evaluation sees them, for
        another run. DataError where it has none.
        """
        for name, table in self._tables.items():
            prefix, store = f"table/{name}/", table.store
            count, names = int(source.read(f"{prefix}{COUNT}")), source.names()
            decay = float(source.read(f"{prefix}{DECAY}")) if f"{prefix}{DECAYED}" in names else None
            parts = {"rows": True, **(table.wide if resume else {}), **({DECAYED: False} if decay is not None else {})}
            if resume and decay is not None:
                store.decayed = decay
            every = source.read(f"{prefix}ids").numpy() if count else np.empty(0, np.int64)
            if len(every) != count:
                raise DataError(
                    f"{source.place}: table {name} has {count} rows by its own count, and ids of {len(every)}"
                )
            first, last = store.columns
            for at in range(0, count, PIECE):
                ids = every[at : at + PIECE]
                size, mine = len(ids), table.own(ids)
                read = {
                    key: source.read(
                        prefix + key, *(((at, first), (size, last - first)) if wide else ((at,), (size,)))
                    ).numpy()[mine]
                    for key, wide in parts.items()
                }
                rows = read.pop("rows")
                if not resume and decay is not None:
                    rows = rows * np.exp(decay - read.pop(DECAYED))[:, None]
                try:
                    store.put(ids[mine], rows, read if resume else None)
                except DataError as error:
                    raise DataError(f"{source.place}: {error}") from error

    def start_from(self, weights: Weights, recipe: Recipe) -> None:
        """Begin with the rows of another run. ConfigError for weights of other programs, which have none."""
        source = weights.source()
        if source is None:
            raise ConfigError(
                f"{weights.place} holds no sparse tables, and {type(recipe).__name__} has some; give a run or a "
                "checkpoint of dtf"
            )
        self.load(source, resume=False)

    def clear(self) -> None:
        """Forget all rows on this rank. Not collective."""
        for table in self._tables.values():
            table.store.clear()

    def learnt(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Ids (n,), ascending, and rows (n, width) that this rank holds, as evaluation sees them; copies, by name.

        Not collective.
        """
        found = {name: table.store.export().ids for name, table in self._tables.items()}
        return {
            name: (torch.from_numpy(ids), torch.from_numpy(self._tables[name].store.lookup(ids, False)))
            for name, ids in found.items()
        }

    def byte_count(self) -> int:
        """Memory of all rows and their optimizer state on this rank."""
        return sum(table.store.byte_count() for table in self._tables.values())

    def _rows(self, name: str, table: ShardedTable, ids: Tensor, train: bool) -> Tensor:
        if ids.is_meta:  # of a rank that computes none of the first layers
            found, inverse = np.empty(0, np.int64), np.empty(0, np.int32)
        else:
            found, inverse = unique(ids.cpu().numpy().reshape(-1))
        rows = table.look(found, train)
        if train:
            self._asked[name] = found, inverse
        kind = torch.float64 if table.store.dtype == np.float64 else torch.float32
        if ids.is_meta:
            return torch.empty((*ids.shape, table.width), dtype=kind, device="meta")
        out = np.empty((len(inverse), table.width), table.store.dtype)
        gather(rows, inverse, out)
        return torch.from_numpy(out).view(*ids.shape, table.width).to(ids.device)


class ShardedTable(ABC):
    """One table over ranks, which hold all of it, other rows, or other columns."""

    by_rows = by_columns = False

    def __init__(self, store: SparseTable, world: World, givers: Sequence[bool]) -> None:
        self.store, self.width, self._world, self._givers = store, store.spec.width, world, givers
        # states that have as many columns as rows
        self.wide = {key: count > 1 for key, (count, _) in store.rule.states(self.width).items()}
        self._merged: tuple[np.ndarray, np.ndarray] = (
            np.empty(0, np.int64),
            np.empty((0, store.spec.width), store.dtype),
        )

    @abstractmethod
    def look(self, ids: np.ndarray, train: bool) -> np.ndarray:
        """Rows (U, width) of distinct ids (U,)."""

    @abstractmethod
    def merge(self, gradients: np.ndarray) -> float:
        """Take gradients (U, width) of the ids of the last `look` for training; the sum of squares of what this rank
        will apply.
        """

    @abstractmethod
    def own(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids (n,) this rank keeps, bool (n,)."""

    def apply(self, factor: float, lr: float, step: int) -> None:
        ids, gradients = self._merged
        self.store.update(ids, gradients, lr, factor, step)


class DataParallelTable(ShardedTable):
    """Every rank holds all rows and applies all gradients.

    Ranks tell each other what they have: bytes per rank, for the most distinct ids U of a rank, (n - 1) x U x (8 +
    width x format); or, for ids of a small range, all rows as one tensor, 2 (n - 1) / n x size x (width + 1) x format,
    when that is less.
    """

    _ids = np.empty(0, np.int64)

    def look(self, ids: np.ndarray, train: bool) -> np.ndarray:
        if train:
            self._ids = ids
        return self.store.lookup(ids, train)

    def merge(self, gradients: np.ndarray) -> float:
        ids = self._ids
        if self._world.size > 1:
            real = (ids >= 0) & self._givers[self._world.rank]
            ids, gradients = self._together(ids[real], gradients[real])
            self.store.lookup(ids, True)  # other ranks have met rows that this one has not
        self._merged = ids, gradients
        return squares(gradients)

    def own(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), bool)

    def _together(self, ids: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All ranks' ids, distinct, and the sums of their gradients, the same bits on every rank."""
        size = self._world.size
        counts = torch.zeros(size, dtype=torch.int64)
        counts[self._world.rank] = len(ids)
        most = int(self._world.reduce(counts).max())
        item = gradients.itemsize
        if self.store.spec.size and 2 * self.store.spec.size * (self.width + 1) * item < size * most * (
            8 + self.width * item
        ):
            dense = np.zeros((self.store.spec.size, self.width + 1), gradients.dtype)
            dense[ids, :-1], dense[ids, -1] = gradients, 1
            self._world.reduce(torch.from_numpy(dense))
            met = np.flatnonzero(dense[:, -1])
            return met, np.ascontiguousarray(dense[met, :-1])
        padded_ids, padded = np.full(most, -1), np.zeros((most, self.width), gradients.dtype)
        padded_ids[: len(ids)], padded[: len(ids)] = ids, gradients[: len(ids)]
        all_ids, everything = np.empty((size, most), np.int64), np.empty((size, most, self.width), gradients.dtype)
        for mine, into in ((padded_ids, all_ids), (padded, everything)):
            dist.all_gather(list(torch.from_numpy(into)), torch.from_numpy(mine))
        real = all_ids.reshape(-1) >= 0
        distinct, inverse = unique(all_ids.reshape(-1)[real])
        return distinct, segment_sum(everything.reshape(-1, self.width)[real], inverse, len(distinct))


class RowWiseTable(ShardedTable):
    """Each rank holds the rows of the ids that a hash gives it, and the others ask for them.

    Bytes per rank, for U distinct ids of its rows: (n - 1) / n x U x (8 + 2 x width x format).
    """

    by_rows = True

    def look(self, ids: np.ndarray, train: bool) -> np.ndarray:
        owner = self._owner(ids)
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=self._world.size)
        receive = np.empty_like(send)
        dist.all_to_all_single(torch.from_numpy(receive), torch.from_numpy(send))
        asked = _exchange(ids[order], send, receive)
        distinct, at = unique(asked)
        found = self.store.lookup(distinct, train)
        reply = np.empty((len(asked), self.width), found.dtype)
        gather(found, at, reply)
        rows = np.empty((len(ids), self.width), found.dtype)
        rows[order] = _exchange(reply, receive, send)
        if train:
            self._last = order, send, receive, distinct, at
        return rows

    def merge(self, gradients: np.ndarray) -> float:
        order, send, receive, distinct, at = self._last
        gives = np.array(self._givers)
        received = _exchange(
            gradients[order] if gives[self._world.rank] else gradients[:0],
            send * gives[self._world.rank],
            receive * gives,
        )
        summed = segment_sum(received, at[np.repeat(gives, receive)], len(distinct))
        self._merged = distinct, summed
        return squares(summed)

    def own(self, ids: np.ndarray) -> np.ndarray:
        return self._owner(ids) == self._world.rank

    def _owner(self, ids: np.ndarray) -> np.ndarray:
        return owner_of(ids, self._world.size)


class TableWiseTable(RowWiseTable):
    """One rank holds the whole table. Bytes as of Dealt, all to and from that rank."""

    def __init__(self, store: SparseTable, world: World, givers: Sequence[bool], rank: int) -> None:
        super().__init__(store, world, givers)
        self._rank = rank

    def _owner(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), self._rank)


class ColumnWiseTable(ShardedTable):
    """Each rank holds some columns of all rows.

    Bytes per rank, for U distinct ids of its rows: (n - 1) x U x 8 + (n - 1) / n x U x 2 x width x format.
    """

    by_columns = True

    def look(self, ids: np.ndarray, train: bool) -> np.ndarray:
        size = self._world.size
        counts = torch.zeros(size, dtype=torch.int64)
        counts[self._world.rank] = len(ids)
        asked_by = self._world.reduce(counts).numpy()
        asked = _exchange(np.tile(ids, size), np.full(size, len(ids)), asked_by)
        distinct, at = unique(asked)
        reply = gather(
            self.store.lookup(distinct, train), at, np.empty((len(asked), self.store.width), self.store.dtype)
        )
        widths = np.array([last - first for first, last in self._ends()])
        flat = _exchange(reply.reshape(-1), asked_by * self.store.width, len(ids) * widths)
        if train:
            self._last = asked_by, widths, distinct, at
        parts = np.split(flat, np.cumsum(len(ids) * widths)[:-1])
        return np.concatenate(
            [part.reshape(len(ids), width) for part, width in zip(parts, widths, strict=True)], axis=1
        )

    def merge(self, gradients: np.ndarray) -> float:
        asked_by, widths, distinct, at = self._last
        gives = np.array(self._givers)
        mine = gradients if gives[self._world.rank] else gradients[:0]
        parts = np.concatenate([mine[:, first:last].reshape(-1) for first, last in self._ends()])
        received = _exchange(parts, len(mine) * widths, asked_by * gives * self.store.width).reshape(
            -1, self.store.width
        )
        summed = segment_sum(received, at[np.repeat(gives, asked_by)], len(distinct))
        self._merged = distinct, summed
        return squares(summed)

    def own(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), bool)

    def _ends(self) -> list[tuple[int, int]]:
        return [bounds(self.width, self._world.size, rank) for rank in range(self._world.size)]


def owner_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` owners a hash gives each id to, (n,) int64."""
    return (mix(ids.astype(np.uint64)) % np.uint64(count)).astype(np.int64)


def _exchange(parts: np.ndarray, send: np.ndarray, receive: np.ndarray) -> np.ndarray:
    """`send[r]` rows of `parts`, in order, to each rank r; what was received, in order of ranks. Collective."""
    out = np.empty((int(receive.sum()), *parts.shape[1:]), parts.dtype)
    dist.all_to_all_single(
        torch.from_numpy(out), torch.from_numpy(np.ascontiguousarray(parts)), receive.tolist(), send.tolist()
    )
    return out


def _boxes(name: str, table: ShardedTable, world: World) -> list[Box]:
    """Ids, rows and their state, as this rank holds them: after those of the ranks before it, where ranks hold
    different rows.
    """
    counts = torch.zeros(world.size, dtype=torch.int64)
    counts[world.rank] = len(table.store)
    if table.by_rows:
        world.reduce(counts)
    elif world.rank and not table.by_columns:
        return []  # the first rank has the same
    before, total = (int(counts[: world.rank].sum()), int(counts.sum())) if table.by_rows else (0, len(table.store))
    return boxes_of(name, table, world.rank == 0, before, total)


def boxes_of(name: str, table: ShardedTable, first: bool, before: int, total: int) -> list[Box]:
    """One part of a table, of `total` rows in all parts of which `before` come first.

    `first`: whether it also tells what all parts have alike.
    """
    ids, rows, states = table.store.export()
    boxes = [Box(f"table/{name}/{COUNT}", torch.tensor(total), (), ())] if first else []
    if first and DECAYED in states:
        boxes.append(Box(f"table/{name}/{DECAY}", torch.tensor(table.store.decayed, dtype=torch.float64), (), ()))
    for key, array in {"ids": ids, "rows": rows, **states}.items():
        if key == "rows" or table.wide.get(key):
            part = torch.from_numpy(array.reshape(len(ids), table.store.width))
            boxes.append(Box(f"table/{name}/{key}", part, (total, table.width), (before, table.store.columns[0])))
        elif first or table.by_rows:
            boxes.append(Box(f"table/{name}/{key}", torch.from_numpy(array), (total,), (before,)))
    return boxes
