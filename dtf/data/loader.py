"""Batches for tickets: the rows of a global batch that this rank reads, fetched ahead in threads where that pays."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dtf.api.recipe import Dataset
from dtf.core.nest import MicroBatches, formats, map_leaves
from dtf.core.types import Batch, Shard
from dtf.data.answers import check_fetched, varying_error
from dtf.data.batches import Epochs, micro_batch_bounds, micro_batches_of

MOST_AHEAD = 64
"""The most batches that are fetched ahead. Each step looks at all of them."""


class Reading:
    """Statistics of the queue of a loader."""

    def __init__(self) -> None:
        self._rows, self._batches, self._ready, self._waited, self._started = 0, 0, 0, 0.0, 0.0

    def got(self, rows: int, ready: int, waited_s: float) -> None:
        """Count a batch of so many rows. `ready`: how many batches were ready when it was asked for; `waited_s`: how
        long it took.
        """
        self._started = self._started or time.perf_counter() - waited_s  # what comes before the first one is no reading
        self._rows, self._batches, self._ready, self._waited = (
            self._rows + rows,
            self._batches + 1,
            self._ready + ready,
            self._waited + waited_s,
        )

    def close(self) -> dict[str, float]:
        """`read_rows_per_s`, `queue_batches` (how many were ready on average when one was asked for), and `stalled`
        (the share of time spent waiting).
        """
        passed = max(time.perf_counter() - self._started, 1e-9)
        return {
            "read_rows_per_s": self._rows / passed,
            "queue_batches": self._ready / max(1, self._batches),
            "stalled": self._waited / passed,
        }


class Loader:
    """This rank's rows of global batches. `shard=None`: this rank reads nothing and gets None. Not collective.

    `join`: see `micro_batch_bounds`.
    """

    def __init__(
        self,
        dataset: Dataset,
        epochs: Epochs,
        shard: Shard | None,
        micro_batch_rows: int,
        pin: bool = False,
        join: bool = True,
    ) -> None:
        self._join = join
        self._dataset, self._epochs, self._shard, self._micro_batch_rows, self._pin = (
            dataset,
            epochs,
            shard,
            micro_batch_rows,
            pin,
        )
        self.prefetch = (
            0 if shard is None else self._batches_of(dataset.queue_rows) if dataset.queue_rows else dataset.prefetch
        )
        self._pool = (
            ThreadPoolExecutor(dataset.threads, "loader", initializer=torch.set_num_threads, initargs=(1,))
            if self.prefetch
            else None
        )
        self._pending: dict[tuple[int, int], Future[Batch]] = {}
        self._unread: dict[int, set[int]] = {}  # epoch -> rows
        self.batches = epochs.batches
        self._formats: dict[int, Any] = {}  # epoch -> of a row, as the first fetch gave them
        self._reading = Reading()

    def get(self, epoch: int, index: int) -> Batch | None:
        """This rank's rows of global batch `index` of `epoch`, B of them, on CPU. Padding of weight 0 when it has none.
        DataError when rows cannot be read.
        """
        if self._shard is None:
            return None
        future = self._pending.pop((epoch, index), None)
        if not self._dataset.queue_rows:
            return future.result() if future is not None else self._fetch(self._cut(epoch, index), epoch)
        # of at most MOST_AHEAD
        ready = sum(other.done() for other in self._pending.values()) + (future is not None and future.done())
        started = time.perf_counter()
        batch = future.result() if future is not None else self._fetch(self._cut(epoch, index), epoch)
        self._reading.got(len(batch.ids), ready, time.perf_counter() - started)
        return batch

    def rows(self, ids: np.ndarray, epoch: int) -> Batch:
        """Any rows, in this order. DataError when they cannot be read."""
        return self._fetch([ids], epoch)

    def batch_ids(self, epoch: int, index: int) -> np.ndarray:
        """Sample ids of a global batch, of all ranks."""
        return self._epochs.ids(epoch, index)

    def size(self, index: int) -> int:
        """Rows of global batch `index` of any epoch, over all ranks."""
        return self._epochs.size(index)

    def ahead(self, keys: list[tuple[int, int]]) -> None:
        """Start to fetch these (epoch, index), which are likely to be asked for next. Drop those fetched ahead that are
        not among them.
        """
        if self._pool is None:
            return
        wanted = set(keys)
        for key in [key for key in self._pending if key not in wanted]:
            self._pending.pop(key).cancel()
        for key in keys:
            if key not in self._pending:
                # The order of an epoch is drawn here, not in the thread: Epochs keeps one epoch at a time.
                self._pending[key] = self._pool.submit(self._fetch, self._cut(*key), key[0])

    def reading(self) -> dict[str, float]:
        """Statistics since the last call: see `Reading.close`.

        Empty for a data set without a queue, and for a rank that reads nothing.
        """
        reading, self._reading = self._reading, Reading()
        return reading.close() if self._dataset.queue_rows and self._shard is not None else {}

    def bad(self, epoch: int) -> int:
        """How many rows of an epoch this rank could not read so far. Ranks read disjoint rows of an epoch, so their
        numbers add up.
        """
        return len(self._unread.get(epoch, ()))

    @property
    def allowed(self) -> int:
        """How many rows may be unreadable, over all ranks."""
        return self._dataset.allowed

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _batches_of(self, rows: int) -> int:
        """How many batches to fetch ahead, so that this rank has `rows` rows in memory."""
        assert self._shard is not None
        return min(max(1, rows // -(-self._epochs.size(0) // self._shard.count) - 1), MOST_AHEAD)

    def _cut(self, epoch: int, index: int) -> list[np.ndarray]:
        """The ids of each fetch for a batch: of all rows, or of each micro-batch where shapes vary."""
        assert self._shard is not None
        ids = self._epochs.ids(epoch, index)
        bounds = micro_batch_bounds(len(ids), self._micro_batch_rows, self._join)
        first, last = micro_batches_of(len(bounds) - 1, self._shard)
        if first == last:
            return [np.concatenate([ids[: min(2, len(ids))], [-1]])]  # the marker makes it padding, see _fetch
        if self._dataset.shapes_vary:
            return [ids[begin:end] for begin, end in pairwise(bounds[first : last + 1])]
        return [ids[bounds[first] : bounds[last]]]

    def _fetch(self, cut: list[np.ndarray], epoch: int) -> Batch:
        padding = cut[-1][-1] < 0
        cut = [cut[0][:-1]] if padding else cut
        rows = np.concatenate(cut) if len(cut) > 1 else cut[0]
        parts = [self._checked(ids, epoch, self._dataset.fetch(ids, epoch)) for ids in cut]
        inputs, targets = parts[0] if len(parts) == 1 else map(MicroBatches, zip(*parts, strict=True))
        weight = torch.zeros(len(rows)) if padding else torch.ones(len(rows))
        if self._dataset.bad and not padding:
            unread = [row in self._dataset.bad for row in (rows % len(self._dataset)).tolist()]
            unreadable = set((rows % len(self._dataset))[unread].tolist())
            weight[unread] = 0
            self._unread.setdefault(epoch, set()).update(unreadable)
        if self._pin:
            inputs, targets, weight = map_leaves(torch.Tensor.pin_memory, (inputs, targets, weight))
        return Batch(inputs, targets, weight, np.full_like(rows, -1) if padding else rows)

    def _checked(self, ids: np.ndarray, epoch: int, fetched: Any) -> Any:
        """What was fetched. ConfigError for what is no answer, and for shapes that change within an epoch where nothing
        says so. From one epoch to the next they may, as where images grow.
        """
        vary, first = self._dataset.shapes_vary, self._formats.get(epoch)
        if vary or first is None or (found := formats(fetched, len(ids))) is None:
            check_fetched(self._dataset, len(ids), fetched)
            if not vary:
                self._formats[epoch] = formats(fetched, len(ids))
        elif found != first:
            raise varying_error(self._dataset, first, found)
        return fetched
