"""One sparse table over the ranks of a run: replicated, row-wise, column-wise or table-wise, in TorchRec's words.

Here ids, rows and gradients travel between ranks; how a table keeps and updates its rows is `dtf.sparse.store`. U
stands for distinct ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dtf.api.row_life import SHARDS
from dtf.core.seeding import mix
from dtf.distributed.sharding import bounds
from dtf.distributed.world import World
from dtf.sparse.id_arrays import gather, segment_sum, squares, unique
from dtf.sparse.store import SparseTable


class Gradients(NamedTuple):
    """What a step does to rows of distinct ids (U,)."""

    ids: np.ndarray
    gradients: np.ndarray  # (U, width)
    seen: np.ndarray | None  # (U, 2) where rows have a life, see `SparseTable.update`


class ShardedTable(ABC):
    """One table over all ranks: replicated, or with other rows or other columns on each rank. `givers`: for each rank,
    whether its gradients count.
    """

    by_rows = by_columns = False

    def __init__(self, store: SparseTable, world: World, givers: Sequence[bool]) -> None:
        self.store, self.width, self._world, self._givers = store, store.spec.width, world, givers
        # states that have as many columns as rows
        self.wide = {key: count > 1 for key, (count, _) in store.rule.states(self.width).items()}
        self.on_disk = bool(store.rule.disk)
        self.lives, self.shards = store.rule.lives, store.rule.shards(store.spec)
        self.columns = self.width + 2 * self.lives
        """How many numbers ranks exchange for an id after a step: its gradient and, where rows have a life, how often
        it was shown and clicked, which are whole numbers and so exact in any order.
        """
        self._merged = Gradients(
            np.empty(0, np.int64), np.empty((0, store.width), store.dtype), np.empty((0, 2)) if self.lives else None
        )

    @abstractmethod
    def lookup(self, ids: np.ndarray, train: bool) -> np.ndarray:
        """Rows (U, width) of this rank's distinct ids (U,). Collective."""

    @abstractmethod
    def merge(self, gradients: np.ndarray) -> float:
        """Take this rank's gradients (U, columns) of the ids of the last `lookup` for training. Returns the sum of
        squares of the gradients that this rank will apply. Collective.
        """

    def read_ahead(self, ids: np.ndarray) -> None:
        """Begin to read the rows of this rank's distinct ids (U,) of the next step, if on disk. Collective."""
        self.store.read_ahead(ids)

    @property
    def owned_shards(self) -> tuple[int, int]:
        """First and last + 1 of the virtual shards whose rows are here."""
        return 0, self.shards

    @abstractmethod
    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids (n,) this rank keeps: bool (n,)."""

    def apply(self, factor: float, lr: float, step: int) -> None:
        """One optimizer step on the rows of this rank, with the gradients of the last `merge` times `factor`."""
        ids, gradients, seen = self._merged
        self.store.update(ids, gradients, lr, factor, step, seen)

    def _take(self, ids: np.ndarray, summed: np.ndarray) -> float:
        """Take what `apply` applies, (U, columns); returns the sum of squares of the gradients."""
        gradients, seen = (summed[:, :-2], summed[:, -2:]) if self.lives else (summed, None)
        self._merged = Gradients(ids, np.ascontiguousarray(gradients), seen)
        return squares(self._merged.gradients)


class DataParallelTable(ShardedTable):
    """Every rank holds all rows and applies all gradients.

    Ranks exchange ids and gradients. Bytes per rank, for the most distinct ids U of a rank: (n - 1) x U x (8 + width x
    format). For ids of a small range all rows are summed as one tensor, 2 (n - 1) / n x size x (width + 1) x format,
    when that is less.
    """

    _ids = np.empty(0, np.int64)

    def lookup(self, ids: np.ndarray, train: bool) -> np.ndarray:
        if train:
            self._ids = ids
        return self.store.lookup(ids, train)

    def merge(self, gradients: np.ndarray) -> float:
        ids = self._ids
        if self._world.size > 1:
            real = (ids != -1) & self._givers[self._world.rank]
            ids, gradients = self._together(ids[real], gradients[real])
            if not self.lives:
                self.store.lookup(ids, True)  # other ranks have met rows that this one has not
        return self._take(ids, gradients)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), bool)

    def _together(self, ids: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids of all ranks, and the sums of their gradients; the same bits on every rank. Collective."""
        size = self._world.size
        counts = torch.zeros(size, dtype=torch.int64)
        counts[self._world.rank] = len(ids)
        most = int(self._world.reduce(counts).max())
        item = gradients.itemsize
        columns = self.columns
        if self.store.spec.size and 2 * self.store.spec.size * (columns + 1) * item < size * most * (
            8 + columns * item
        ):
            dense = np.zeros((self.store.spec.size, columns + 1), gradients.dtype)
            dense[ids, :-1], dense[ids, -1] = gradients, 1
            self._world.reduce(torch.from_numpy(dense))
            met = np.flatnonzero(dense[:, -1])
            return met, np.ascontiguousarray(dense[met, :-1])
        padded_ids, padded = np.full(most, -1), np.zeros((most, columns), gradients.dtype)
        padded_ids[: len(ids)], padded[: len(ids)] = ids, gradients[: len(ids)]
        all_ids, everything = np.empty((size, most), np.int64), np.empty((size, most, columns), gradients.dtype)
        for local_part, into in ((padded_ids, all_ids), (padded, everything)):
            dist.all_gather(list(torch.from_numpy(into)), torch.from_numpy(local_part))
        real = all_ids.reshape(-1) != -1
        distinct, inverse = unique(all_ids.reshape(-1)[real])
        return distinct, segment_sum(everything.reshape(-1, columns)[real], inverse, len(distinct))


class RowWiseTable(ShardedTable):
    """Each rank holds the rows of the ids that a hash assigns to it. The others ask for them.

    Bytes per rank, for U distinct ids of its rows: (n - 1) / n x U x (8 + 2 x width x format).
    """

    by_rows = True

    def read_ahead(self, ids: np.ndarray) -> None:
        asked, *_ = self._asked(ids)
        super().read_ahead(unique(asked)[0])

    def _asked(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The ids that all ranks ask this one for, in which order this rank's ids are sent, and how many are sent to
        each rank and received from it. Collective.
        """
        owner = self._owner(ids)
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=self._world.size)
        receive = np.empty_like(send)
        dist.all_to_all_single(torch.from_numpy(receive), torch.from_numpy(send))
        return _exchange(ids[order], send, receive), order, send, receive

    def lookup(self, ids: np.ndarray, train: bool) -> np.ndarray:
        asked, order, send, receive = self._asked(ids)
        distinct, at = unique(asked)
        stored_rows = self.store.lookup(distinct, train)
        reply = np.empty((len(asked), self.width), stored_rows.dtype)
        gather(stored_rows, at, reply)
        rows = np.empty((len(ids), self.width), stored_rows.dtype)
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
        return self._take(distinct, summed)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        return self._owner(ids) == self._world.rank

    @property
    def owned_shards(self) -> tuple[int, int]:
        ends = bounds_of_shards(self.shards, self._world.size)
        return ends[self._world.rank], ends[self._world.rank + 1]

    def _owner(self, ids: np.ndarray) -> np.ndarray:
        return owner_of(ids, self._world.size, self.shards)


class TableWiseTable(RowWiseTable):
    """One rank holds the whole table. Bytes as of RowWiseTable, all to and from that rank."""

    def __init__(self, store: SparseTable, world: World, givers: Sequence[bool], rank: int) -> None:
        super().__init__(store, world, givers)
        self._rank = rank

    @property
    def owned_shards(self) -> tuple[int, int]:
        return (0, self.shards) if self._rank == self._world.rank else (0, 0)

    def _owner(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), self._rank)


class ColumnWiseTable(ShardedTable):
    """Each rank holds some columns of all rows.

    Bytes per rank, for U distinct ids of its rows: (n - 1) x U x 8 + (n - 1) / n x U x 2 x width x format.
    """

    by_columns = True

    def lookup(self, ids: np.ndarray, train: bool) -> np.ndarray:
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
        sent = gradients if gives[self._world.rank] else gradients[:0]
        parts = [np.concatenate([sent[:, a:b], sent[:, self.width :]], axis=1).reshape(-1) for a, b in self._ends()]
        more = self.columns - self.width
        columns = self.store.width + more
        received = _exchange(np.concatenate(parts), len(sent) * (widths + more), asked_by * gives * columns)
        summed = segment_sum(received.reshape(-1, columns), at[np.repeat(gives, asked_by)], len(distinct))
        return self._take(distinct, summed)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), bool)

    def _ends(self) -> list[tuple[int, int]]:
        return [bounds(self.width, self._world.size, rank) for rank in range(self._world.size)]


def owner_of(ids: np.ndarray, count: int, shards: int = SHARDS) -> np.ndarray:
    """Which of `count` owners has each id: (n,) int64. A hash gives the virtual shard, a power of two of them, and each
    owner has as many that follow each other, so that what is kept by shard is one part of a tensor.
    """
    bits = shards.bit_length() - 1
    hashes = mix(ids.astype(np.uint64))
    shard = (hashes >> np.uint64(64 - bits) if bits else np.zeros_like(hashes)).astype(np.int64)
    return np.searchsorted(bounds_of_shards(shards, count)[1:], shard, side="right")


def owned_hashes(count: int, owner: int, shards: int = SHARDS) -> tuple[int, int]:
    """The least and the largest hash of the ids of an owner."""
    ends, bits = bounds_of_shards(shards, count), shards.bit_length() - 1
    return ends[owner] << 64 - bits, (ends[owner + 1] << 64 - bits) - 1


def bounds_of_shards(shards: int, count: int) -> list[int]:
    """First shard of each of `count` owners, and how many there are."""
    return [shards * owner // count for owner in range(count + 1)]


def _exchange(parts: np.ndarray, send: np.ndarray, receive: np.ndarray) -> np.ndarray:
    """Send `send[r]` rows of `parts`, in order, to each rank r. Returns what was received, in order of ranks.
    Collective.
    """
    out = np.empty((int(receive.sum()), *parts.shape[1:]), parts.dtype)
    dist.all_to_all_single(
        torch.from_numpy(out), torch.from_numpy(np.ascontiguousarray(parts)), receive.tolist(), send.tolist()
    )
    return out
