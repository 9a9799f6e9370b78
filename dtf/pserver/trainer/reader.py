"""Reads the rows of data that leases are about."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from dtf.api.task import Task
from dtf.core.types import WHOLE, Batches, Shard, Train
from dtf.data.batches import share_within
from dtf.model.forward import apply_receive, to_device
from dtf.pserver.leases import EVALUATE, Lease
from dtf.pserver.row_routing import RowRequest
from dtf.pserver.trainer.prefetch import PreparedBatch

Open = Callable[[str, Shard, int], Batches]
"""See `RoleContext.open`."""


class BatchReader:
    """Reads tickets of leases.

    `servers`: over how many the rows of tables are divided. `part`: what this process reads of each lease.
    """

    def __init__(
        self, task: Task, open: Open, device: torch.device, micro_batch_rows: int, servers: int, part: Shard = WHOLE
    ) -> None:
        self._task, self._open, self._device = task, open, device
        self._micro_batch_rows, self._servers, self._part = micro_batch_rows, servers, part
        self._widths = {name: table.width for name, table in task.recipe.tables().items()}
        self._loaders: dict[tuple[int, int, int], Batches] = {}
        self._turn = threading.Lock()

    def __call__(self, lease: Lease, ticket: Train) -> PreparedBatch:
        """Read one ticket. Threads that call it take turns."""
        evaluates = lease.kind == EVALUATE
        key = (lease.kind, 0 if evaluates else lease.part, lease.shares)
        with self._turn:
            if key not in self._loaders:
                split, rows = (
                    ("eval", -(-self._task.step.batch_size // self._part.count))
                    if evaluates
                    else ("train", self._micro_batch_rows)
                )
                self._loaders[key] = self._open(split, share_within(Shard(key[1], lease.shares), self._part), rows)
            loader = self._loaders[key]
            loader.ahead([(ticket.epoch, ticket.index)])
            batch = loader.get(ticket.epoch, ticket.index)
        assert batch is not None
        unread = int(((batch.weight == 0).numpy() & (batch.ids >= 0)).sum())
        batch = apply_receive(to_device(batch, self._device, self._task), self._task)
        return PreparedBatch(lease, ticket, batch, RowRequest(batch, self._widths, self._servers), unread)
