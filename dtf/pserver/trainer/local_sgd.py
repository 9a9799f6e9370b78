"""Local training between two exchanges (mode geo): it begins with the servers' state, and ends with the changes it
made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dtf.api.task import Task
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.model.init import DTYPES
from dtf.optim.sharding import Sharding, full_params
from dtf.optim.update import LocalUpdate
from dtf.pserver.param_slices import Field, Layout, state_fields, views
from dtf.pserver.row_routing import RowGradients, RowRequest
from dtf.pserver.trainer.compute import ByTable, LeaseResult, TrainerModel
from dtf.pserver.trainer.prefetch import PreparedBatch
from dtf.sparse.sharded_tables import ShardedTables
from dtf.sparse.store import SparseTable
from dtf.sparse.table_layouts import DataParallelTable, owner_of


class LocalSgd:
    """Trains locally, from `begin` to `differences`. Of tables it holds only the rows that occurred since `begin`."""

    def __init__(self, task: Task, model: TrainerModel, layouts: Sequence[Layout]) -> None:
        self._task, self._model = task, model
        self._state_fields: list[tuple[Field, ...]] = []
        self._bytes: list[int] = []
        for layout in layouts:
            layout_fields, size = state_fields(layout, task.optimizer)
            self._state_fields.append(layout_fields)
            self._bytes.append(size)
        kind = np.float64 if DTYPES[task.precision.param] is torch.float64 else np.float32
        world = World(Place())
        assert task.rows is not None or not task.recipe.tables()
        self._stores = (
            {name: SparseTable(spec, task.rows, task.seed, name, kind) for name, spec in task.recipe.tables().items()}
            if task.rows
            else {}
        )
        self._tables = (
            ShardedTables(
                {name: DataParallelTable(store, world, [True]) for name, store in self._stores.items()}, world, 1.0
            )
            if self._stores
            else None
        )
        sharding = Sharding(params=full_params(model.replica.model, model.masters), tables=self._tables)
        self._update = LocalUpdate(sharding, task.optimizer, task.step.clip_norm)
        self._metric_count = 1 + len(task.recipe.train_metrics)

    @torch.no_grad()
    def begin(self, states: Sequence[np.ndarray]) -> None:
        """Take the servers' blocks with their optimizer state, as `state_fields` lays them out."""
        self._before = [torch.from_numpy(state) for state in states]
        for layout_fields, memory in zip(self._state_fields, self._before, strict=True):
            for field, arrived in zip(layout_fields, views(memory, layout_fields), strict=True):
                self._kept_tensor(field).copy_(arrived)
        # it may have evaluated last, and a step without rows here says nothing else of it
        self._model.replica.model.train()
        self._update.refresh(0)
        self._model.invalidate()
        self._skipped_before = self._update.skipped()
        for store in self._stores.values():
            store.clear()
        self._met: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in self._stores}
        self._sums = torch.zeros(self._metric_count, dtype=torch.float64)
        self._statistics: list[np.ndarray] = []
        self._updates = 0

    def missing(self, row_request: RowRequest, server: int) -> dict[str, np.ndarray]:
        """The ids of a batch that this server owns and whose rows are not here yet, by table."""
        return {name: ids[~self._stores[name].has(ids)] for name, ids in row_request.ids(server).items()}

    def keep(self, name: str, ids: np.ndarray, records: np.ndarray) -> None:
        """Take rows with their state from a server."""
        self._stores[name].keep(ids, records)
        self._met[name].append((ids, records))

    def step(self, prepared: PreparedBatch) -> None:
        """One step over the rows of one ticket of the lease."""
        bounds, (first, last) = self._model.micro_batches(prepared)
        if first == last:  # the last batch of an epoch may be too small for all shares
            self._statistics.append(np.zeros_like(self._model.statistics_added()))
            return
        batch = prepared.batch if self._tables is None else self._tables.lookup(prepared.batch, train=True)
        rows = bounds[last] - bounds[first]
        self._sums += self._model.forward_backward(prepared, batch, 1.0 / rows).cpu().double()
        self._model.divide_by_counts(rows)
        added = self._model.statistics_added()
        if self._tables is not None:
            self._tables.backward(self._model.replica.row_gradients)
        if not np.isfinite(added).all():  # then the step is skipped, as everywhere
            for parameter in self._model.parameters.values():
                parameter.grad = None if parameter.grad is None else torch.full_like(parameter.grad, torch.nan)
        self._update.table_steps = prepared.ticket.step
        self._update.apply(prepared.ticket.step, prepared.ticket.lr)
        finite = bool(self._update.applied)
        self._statistics.append(added if finite else np.full_like(added, np.nan))
        self._updates += finite

    @torch.no_grad()
    def differences(self) -> LeaseResult:
        """The changes since `begin`."""
        dense = []
        for layout_fields, size, before in zip(self._state_fields, self._bytes, self._before, strict=True):
            memory = torch.zeros(size, dtype=torch.uint8)
            for field, into, was in zip(
                layout_fields, views(memory, layout_fields), views(before, layout_fields), strict=True
            ):
                into.copy_(self._kept_tensor(field)).sub_(was)
            dense.append(memory.numpy())
        skipped = self._update.skipped() - self._skipped_before
        return LeaseResult(
            dense, self._rows(), self._sums, np.concatenate(self._statistics), 0.0, self._updates, skipped
        )

    def _rows(self) -> Sequence[ByTable]:
        parts: list[dict[str, RowGradients]] = [{} for _ in self._state_fields]
        for name, met in self._met.items():
            ids = np.concatenate([ids for ids, _ in met])
            learnt = self._stores[name].records(ids) - np.concatenate([records for _, records in met])
            owners = owner_of(ids, len(parts))
            for server, part in enumerate(parts):
                owned = owners == server
                part[name] = RowGradients(ids[owned], learnt[owned])
        return parts

    def _kept_tensor(self, field: Field) -> Tensor:
        tensor = self._update.kept(field.block.name)[field.key]
        return field.block.of(tensor) if field.shape else tensor
