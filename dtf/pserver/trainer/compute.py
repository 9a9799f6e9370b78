"""The model of a trainer: gradients of one lease from what was pulled, by server. Knows no messages."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import WHOLE, Batch, Evaluated, Shard
from dtf.data.batches import micro_batch_bounds, micro_batches_of, share_within
from dtf.model.forward import copy_of, global_rng_error, loss_dtype, rows_of, zero_rows_for_tables
from dtf.model.init import cast, model_of
from dtf.model.loss_terms import per_count, scale_gradients
from dtf.model.shared_state import SharedState
from dtf.pserver.net.compression import rounded
from dtf.pserver.net.messages import NONE
from dtf.pserver.param_slices import Layout, views
from dtf.pserver.row_routing import RowGradients
from dtf.pserver.same_start import TrainerStart
from dtf.pserver.trainer.prefetch import PreparedBatch
from dtf.strategies.own_memory import refuse_shared_memory
from dtf.strategies.replica import Replica
from dtf.strategies.start_check import ALONE, check_evaluation, differing_module
from dtf.strategies.trial_numbers import trial

ByTable = Mapping[str, RowGradients]
"""By table, what a push has of rows; with local training changes of these and their states."""


class ParamBlocks(NamedTuple):
    """Learning blocks of one server as they arrived, and the stamp of their state."""

    stamp: int
    data: np.ndarray


class PulledState(NamedTuple):
    """What the servers gave for one lease; lists are by server."""

    dense: list[ParamBlocks]
    rows: list[dict[str, np.ndarray]]
    applied: list[int]  # updates in it
    scale: float
    buffers: np.ndarray | None = None  # those that passes change and a rule keeps right, as bytes


class LeaseResult(NamedTuple):
    """The result of one lease; `dense` and `rows` by server, see `Push`."""

    dense: list[np.ndarray]
    rows: Sequence[ByTable]
    sums: Tensor  # (M,)
    statistics: np.ndarray
    norm: float
    finite: int
    skipped: int = 0
    counts: float | None = None
    buffers: np.ndarray | None = None  # see `Push.buffers`


class ModelSetup(NamedTuple):
    """What all processes and threads of one trainer compute with.

    `layouts`: of what is pulled and pushed, by server. `shares`: into how many leases the rows of a step are cut.
    `whole_norm`: whether pushes need the norm of the whole gradient. `wire`: dtype in which fp32 blocks travel, None:
    unchanged. `no_buffers`: why servers cannot keep buffers that passes change, and what to do; empty where they can.
    `under_way`: of how many leases before the gradients must stay as they are while others are computed.
    """

    task: Task
    device: torch.device
    layouts: Sequence[Layout]  # of what is pulled and pushed, by server
    shares: int
    micro_batch_rows: int
    whole_norm: bool = False
    wire: torch.dtype | None = None
    no_buffers: str = ""
    under_way: int = 0


class TrainerModel:
    """A trainer's copy of the model. `part`: what this process computes of each lease.

    `threads`: how many of this process compute with one copy of the parameters. `first`: the model of one of them,
    whose parameters this one uses. Buffers, gradients and statistics are its own.
    """

    def __init__(
        self, setup: ModelSetup, part: Shard = WHOLE, threads: int = 1, first: TrainerModel | None = None
    ) -> None:
        task, device, layouts = setup.task, setup.device, setup.layouts
        self._task, self.device, self._layouts = task, device, layouts
        self._shares, self._micro_batch_rows = setup.shares, setup.micro_batch_rows
        self._whole_norm, self._wire, self._part = setup.whole_norm, setup.wire, part
        self._no_buffers = setup.no_buffers
        model = model_of(task)
        refuse_shared_memory(model, "strategy=pserver", "strategy=ddp")
        self.masters = cast(model, task.precision, device)
        self.parameters = dict(model.named_parameters())
        if first is not None:
            self.masters = first.masters
            for name, parameter in self.parameters.items():
                # the memory is the same; torch sees two tensors, and no change of one as that of the other
                parameter.data = first.parameters[name].data
        self._flat = [self._flattened(layout) for layout in layouts] if first is None else first._flat
        self.replica = Replica(model, task, device)
        self.replica.divided, self.replica.instead = True, "strategy=ddp launcher.processes=1"
        self._learning = [
            [block.of(self.parameters[block.name].data) for block in layout.learning] for layout in layouts
        ]
        self._threads = threads
        self._few: Batch | None = None  # for passes of all copies over the same rows
        self.start: TrainerStart | None = None  # after `warmup`
        # stamps of what the parameters are, by server
        self._loaded: list[int] = first._loaded if first else [NONE] * len(layouts)
        self._loading = first._loading if first else threading.Lock()
        self._outgoing = deque(_Outgoing(layouts, device) for _ in range(1 + setup.under_way))

    def warmup(self, batch: Batch) -> None:
        """A pass whose results are dropped: a model that cannot run fails here, before servers are asked."""
        tables = self._task.recipe.tables()
        if tables:
            batch = self.replica.receiver.train(batch, 0, 0)
            batch = batch._replace(inputs=zero_rows_for_tables(batch.inputs, tables))
        batch = rows_of(batch, 0, 8)
        drew = self.replica.warmup(batch, ALONE)
        if self._threads > 1:  # others write to these parameters meanwhile
            self.replica.compile_trial.skip_machine_code()
        self._refuse_shared(self.replica.shared_changes)
        if self.replica.changing and self._no_buffers:
            raise ConfigError(
                f"strategy=pserver: the forward pass changes the buffer {self.replica.changing.names[0]}, and "
                f"{self._no_buffers}; or use strategy=ddp"
            )
        if drew and self._threads > 1:
            raise global_rng_error("and the threads of strategy.hogwild_threads share one generator")
        self._few = batch
        self.start = TrainerStart.of(self.replica, self._task.recipe)

    def follow(self, first: TrainerModel) -> None:
        """Take over what the `warmup` of another model of this process has found. ConfigError where this one gives
        other numbers.
        """
        assert first._few is not None
        self.replica.follow(first.replica)
        passes = [first.replica.passes(first._few), self.replica.passes(first._few)]
        self.refuse_other_model(differing_module(passes, self._task.precision.compute, ALONE))
        self.start = first.start

    @staticmethod
    def refuse_other_model(module: str | None) -> None:
        """Raise ConfigError for what `differing_module` has found."""
        if module is not None:
            raise ConfigError(
                "strategy=pserver: copies of the model in one trainer give different numbers for the same rows: "
                f"{module or 'the loss'} is the first to differ. They have the same parameters and buffers; draw what "
                "the constructor keeps elsewhere from torch's global generator, which is seeded, or make it a buffer"
            )

    @contextmanager
    def _nothing_shared(self) -> Iterator[None]:
        """A context for passes. ConfigError where several threads compute, and passes change what they share."""
        shared = SharedState(self.replica.model, self._task.recipe) if self._threads > 1 else None
        yield
        self._refuse_shared(shared.changed() if shared else [])

    def _refuse_shared(self, names: list[str]) -> None:
        if names and self._threads > 1:
            raise ConfigError(
                f"strategy.hogwild_threads={self._threads}: passes change {', '.join(names[:3])}, which all threads "
                "share; keep it in the module itself, or use strategy.hogwild_threads=1"
            )

    def trial_eval(self, batch: Batch) -> Evaluated:
        """Evaluate a few rows, with zeros in place of rows of sparse tables, without a trace."""
        tables = self._task.recipe.tables()
        if tables:
            batch = self.replica.receiver.evaluate(batch)
            batch = batch._replace(inputs=zero_rows_for_tables(batch.inputs, tables))
        with trial([self.replica.model], self._task), self._nothing_shared():
            evaluated = self.replica.evaluate(copy_of(batch))
            check_evaluation(
                self.replica.evaluate, batch, [self.replica.model], self._task, ALONE, self.replica.instead
            )
            return evaluated

    def gradients(self, prepared: PreparedBatch, pulled: PulledState) -> LeaseResult:
        """Gradients of the sum of losses over the rows of a lease, divided by the rows of the global batch."""
        self.load(pulled)
        batch = prepared.row_request.fill(prepared.batch, pulled.rows, self.device)
        sums = self.forward_backward(prepared, batch, pulled.scale / prepared.ticket.rows)
        counts = self.counts
        if counts is not None and self._shares == 1:  # those of the whole step
            self.divide_by_counts(prepared.ticket.rows)
            counts = None
        self._outgoing.rotate()
        for layout, outgoing in zip(self._layouts, self._outgoing[0].views, strict=True):
            grads = [self.parameters[block.name].grad for block in layout.learning]
            parts = [
                torch.zeros_like(view) if grad is None else block.of(grad)
                for grad, block, view in zip(grads, layout.learning, outgoing, strict=True)
            ]
            if outgoing:
                torch._foreach_copy_(outgoing, parts)
        for parameter in self.parameters.values():
            parameter.grad = None
        rows = prepared.row_request.gradients(self.replica.row_gradients)
        dense = [memory.cpu().numpy() for memory in self._outgoing[0].memory]
        norm, added = self._norm(rows) if self._whole_norm else 0.0, self.statistics_added()
        finite = math.isfinite(norm) and math.isfinite(counts or 0.0)
        changing = self.replica.changing.total()
        return LeaseResult(
            dense,
            rows,
            sums,
            added,
            norm if finite else 0.0,
            int(finite and np.isfinite(added).all()),
            counts=counts if finite or counts is None else 0.0,
            buffers=None if changing is None else changing.cpu().numpy(),
        )

    @property
    def counts(self) -> float | None:
        """What the losses of the last pass are to be divided by in place of rows; None: rows."""
        return None if self.replica.counts is None else float(self.replica.counts)

    def divide_by_counts(self, rows: int) -> None:
        """Divide the gradients of the last pass, which are divided by so many rows, by its counts, if it has some."""
        if self.counts is not None:
            ratio = per_count(rows, torch.tensor(self.counts, dtype=torch.float64))
            scale_gradients(self.replica.model.parameters(), self.replica.row_gradients.values(), ratio)

    def forward_backward(self, prepared: PreparedBatch, batch: Batch, factor: float) -> Tensor:
        """Forward and backward over the rows of a lease: gradients of `factor` x (sum of losses) in the parameters.

        Returns the metric sums (M,).
        """
        ticket, lease = prepared.ticket, Shard(prepared.lease.part, prepared.lease.shares)
        bounds, _ = self.micro_batches(prepared)
        part = micro_batches_of(len(bounds) - 1, share_within(lease, self._part))
        self.replica.statistics.forget(ticket.step)
        scale = torch.full((), factor, dtype=loss_dtype(self._task), device=self.device)
        with self._randomness_to_itself():
            return self.replica.accumulate(ticket, batch, bounds, part, lease, scale)

    def _randomness_to_itself(self) -> AbstractContextManager[object]:
        """A context in which no other thread seeds torch's global generator, of which the model may draw.

        Of several threads that compute, none draws.
        """
        return self.replica.receiver.lock if self._threads == 1 else nullcontext()

    def statistics_added(self) -> np.ndarray:
        """What the last pass adds to running averages, see `BatchNormStatistics.added`."""
        return self.replica.statistics.added().cpu().numpy()

    def micro_batches(self, prepared: PreparedBatch) -> tuple[list[int], tuple[int, int]]:
        """Bounds of all micro-batches of the ticket, and the first and last + 1 of those of the lease."""
        bounds = micro_batch_bounds(prepared.ticket.rows, self._micro_batch_rows)
        return bounds, micro_batches_of(len(bounds) - 1, Shard(prepared.lease.part, prepared.lease.shares))

    def evaluate(self, prepared: PreparedBatch, pulled: PulledState) -> Evaluated:
        """Evaluate one micro-batch."""
        self.load(pulled)
        return self.evaluate_rows(prepared.row_request.fill(prepared.batch, pulled.rows, self.device))

    def evaluate_rows(self, batch: Batch) -> Evaluated:
        """Evaluate one micro-batch with the parameters that are here."""
        with self._randomness_to_itself():
            return self.replica.evaluate(batch)

    @torch.no_grad()
    def load(self, pulled: PulledState) -> None:
        """Put pulled blocks into the model.

        Other threads that compute with the same parameters go on meanwhile. Blocks older than those in the model are
        skipped.
        """
        with self._loading:
            for server, (layout, into, (stamp, data)) in enumerate(
                zip(self._layouts, self._learning, pulled.dense, strict=True)
            ):
                if into and (stamp != self._loaded[server] if self._threads == 1 else stamp > self._loaded[server]):
                    blocks, flat = torch.from_numpy(data), self._flat[server]
                    if flat is None:
                        torch._foreach_copy_(into, views(blocks.to(self.device), layout.learning))
                    else:
                        flat.copy_(blocks)
                    self._loaded[server] = stamp
        if pulled.buffers is not None:
            self.replica.changing.take_values(torch.from_numpy(pulled.buffers))

    def _flattened(self, layout: Layout) -> Tensor | None:
        """Memory in which the parameters lie from now on exactly as a server's blocks travel.

        None where the blocks are slices of parameters, or of another dtype.
        """
        if any(
            block.shape != block.whole or self.parameters[block.name].dtype is not block.dtype
            for block in layout.learning
        ):
            return None
        memory = torch.zeros(layout.bytes, dtype=torch.uint8, device=self.device)
        for block, view in zip(layout.learning, views(memory, layout.learning), strict=True):
            parameter = self.parameters[block.name]
            view.copy_(parameter.data)
            if self.masters[block.name].dtype is block.dtype:  # then it is the parameter
                self.masters[block.name] = view
            parameter.data = view
        return memory

    def invalidate(self) -> None:
        """Others changed the parameters: the next `load` writes all blocks."""
        self._loaded[:] = [NONE] * len(self._layouts)

    @torch.no_grad()
    def take_frozen(self, server: int, data: np.ndarray) -> None:
        """Put blocks that do not learn, and server 0's buffers, into the model; see `ServerState.frozen`."""
        layout, memory = self._layouts[server], torch.from_numpy(data)
        for block, view in zip(layout.frozen, views(memory, layout.frozen), strict=True):
            block.of(self.parameters[block.name].data).copy_(view)
        at = layout.frozen_bytes
        for name, buffer in self.replica.model.named_buffers() if server == 0 else ():
            if name in self.replica.scratch:
                continue
            size = buffer.numel() * buffer.element_size()
            buffer.copy_(memory[at : at + size].clone().view(buffer.dtype).view(buffer.shape))
            at += size

    def _norm(self, rows: Sequence[ByTable]) -> float:
        from dtf.sparse.id_arrays import squares

        total = sum(squares(rounded(gradients, self._wire)) for part in rows for _, gradients, *_ in part.values())
        for gradients in self._outgoing[0].views:
            total += sum(float(view.double().square().sum()) for view in gradients)
        return math.sqrt(total)


class _Outgoing:
    """Gradients as they travel. `memory`, `views`: by server."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device) -> None:
        self.memory = [torch.zeros(layout.bytes, dtype=torch.uint8, device=device) for layout in layouts]
        self.views = [views(memory, layout.learning) for memory, layout in zip(self.memory, layouts, strict=True)]
