"""Reads the rows of data that leases are about."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from dtf.api.task import Task
from dtf.core.types import WHOLE, Batch, Batches, Shard, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of, share_within
from dtf.model.forward import to_device
from dtf.model.receive import Receiver
from dtf.pserver.leases import EVALUATE, Lease
from dtf.pserver.row_routing import RowRequest, routed_tables
from dtf.pserver.trainer.prefetch import PreparedBatch

Open = Callable[[str, Shard, int], Batches]
"""See `RoleContext.open`."""


ROWS_TO_TRY = 8


class BatchReader:
    """Reads tickets of leases.

    `servers`: over how many the rows of tables are divided. `part`: what this process reads of each lease.
    """

    def __init__(
        self, task: Task, open: Open, device: torch.device, micro_batch_rows: int, servers: int, part: Shard = WHOLE
    ) -> None:
        self._receiver = Receiver(task)
        self._task, self._open, self._device = task, open, device
        self._micro_batch_rows, self._servers, self._part = micro_batch_rows, servers, part
        self._tables = routed_tables(task)
        self._loaders: dict[tuple[int, int, int], Batches] = {}
        self._turn = threading.Lock()

    def __call__(self, lease: Lease, ticket: Train) -> PreparedBatch:
        """Read one ticket. Threads that call it take turns."""
        evaluates = lease.kind == EVALUATE
        key = (lease.kind, 0 if evaluates else lease.part, lease.shares)
        with self._turn:
            if key not in self._loaders:
                split, rows = (
                    ("eval", self._task.step.evaluation_rows) if evaluates else ("train", self._micro_batch_rows)
                )
                self._loaders[key] = self._open(split, share_within(Shard(key[1], lease.shares), self._part), rows)
            loader = self._loaders[key]
            loader.ahead([(ticket.epoch, ticket.index)])
            batch = loader.get(ticket.epoch, ticket.index)
        assert batch is not None
        unread = int(((batch.weight == 0).numpy() & (batch.ids >= 0)).sum())
        batch = to_device(batch, self._device, self._task)
        if self._receiver.early:
            batch = self._receiver.evaluate(batch) if evaluates else self._received(batch, lease, ticket)
        tables = (
            {name: table._replace(lives=False) for name, table in self._tables.items()} if evaluates else self._tables
        )
        row_request = RowRequest(batch, tables, self._servers, self._task.recipe.clicks)
        return PreparedBatch(lease, ticket, batch, row_request, unread)

    def _received(self, batch: Batch, lease: Lease, ticket: Train) -> Batch:
        """Rows of a step with the ids that are looked up."""
        bounds = micro_batch_bounds(ticket.rows, self._micro_batch_rows)
        share = share_within(Shard(lease.part, lease.shares), self._part)
        first, last = micro_batches_of(len(bounds) - 1, share)
        at = [bound - bounds[first] for bound in bounds[first : last + 1]]
        return self._receiver.join(batch, at, lambda part, j: self._receiver.train(part, ticket.step, first + j))


def rows_to_try(open: Open, shares: int, micro_batch_rows: int) -> Batch:
    """Rows for the passes of a start, the same for all trainers."""
    loader = open("train", Shard(0, shares), micro_batch_rows)
    last = loader.batches - 1  # it may be a single row, which not every model can compute
    ids = loader.batch_ids(0, last if loader.size(last) == 1 else 0)
    return loader.rows(ids[: min(ROWS_TO_TRY, -(-len(ids) // shares))], 0)
