"""The state of one server and how pushes change it: blocks, rows, optimizer state, running averages.

Knows nothing of leases and messages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dtf.api.task import Source, Task
from dtf.core.types import Memory, Shard, State, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.world import World
from dtf.model.init import cast, model_of
from dtf.optim.sharding import ParamShard, Sharding
from dtf.optim.update import LocalUpdate
from dtf.pserver.net.compression import WIRE_DTYPES
from dtf.pserver.net.messages import ANY, NONE
from dtf.pserver.param_slices import balance, lay_out, state_fields, views, wire_layout
from dtf.pserver.push import Push
from dtf.pserver.record.recorder import Pull, Recorder
from dtf.pserver.row_routing import RowGradients, server_shards
from dtf.pserver.server.model_buffers import ModelBuffers, Tickets
from dtf.pserver.sync_modes import SyncMode
from dtf.strategies.buffers import buffers, load_buffers

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions


class ServerState:
    """This server's part of the state. One thread changes it, others may pull.

    `shares`, `micro_batch_rows`: how the rows of a step are cut. `stamp` changes with the state; `applied` counts
    updates.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        strategy: PserverOptions,
        sync_mode: SyncMode,
        shares: int,
        micro_batch_rows: int,
    ) -> None:
        self._task, self._world, self._sync_mode = task, world, sync_mode
        self._shares, self._micro_batch_rows = shares, micro_batch_rows
        model = model_of(task)
        self._part = ModelBuffers(task, model, shares, self._micro_batches)
        masters = cast(model, task.precision, world.device)
        layouts = lay_out(
            model,
            task.precision,
            world.size,
            not task.optimizer.by_tensor,
            strategy.min_block,
            strategy.placement,
        )
        self.layout, self.balance = layouts[world.rank], balance(layouts)
        self.wire = WIRE_DTYPES[strategy.wire.value]
        self._wire_layout = wire_layout(self.layout, self.wire)
        self._outgoing, self._outgoing_stamp = (
            torch.zeros(self._wire_layout.bytes if self.wire else 0, dtype=torch.uint8, device=world.device),
            -1,
        )
        self._dense, self._frozen, self._gradients = (
            torch.zeros(size, dtype=torch.uint8, device=world.device)
            for size in (self.layout.bytes, self.layout.frozen_bytes, self.layout.bytes)
        )
        self._arriving = views(self._gradients, self.layout.learning)
        self._learning: list[nn.Parameter] = []
        self.shards = server_shards(task, world)
        sharding = Sharding(
            params=self._param_shards(masters),
            all_norms=self._whole_norm,
            tables=self.shards,
            like=next(iter(masters.values())).new_zeros(0),
        )
        options = task.optimizer, task.step.clip_norm, task.precision.loss_scale
        self._update = LocalUpdate(sharding, *options)
        for parameter in model.parameters():
            parameter.data = parameter.data.new_zeros(0)  # the blocks have it now
        self._state_fields, self._field_bytes = state_fields(self.layout, task.optimizer)
        model.train()
        self._norm: Tensor | None = None  # of the update being made, where trainers know it
        self.lock = threading.Lock()  # of the state
        self._skipped = 0  # updates that trainers which learn by themselves did not make
        self.recorder: Recorder | None = None
        self.stamp = self.applied = 0
        self.staleness: Counter[int] = Counter()
        """Updates between what a push was computed from and itself -> how many pushes."""

    # ------------------------------------------------------------ what pushes do

    def apply(self, pushes: Sequence[Push], tickets: Tickets) -> Tensor:
        """Make one update. Returns its gradient norm, (2,) [norm, 1]; with local training the sum over steps.

        Collective over the servers where `SyncMode.collective`.
        """
        with self.lock:
            norm, whole = (
                (self._add_changes(pushes, tickets), True)
                if self._sync_mode.local_training
                else self._update_by(pushes, tickets)
            )
            if not self._world.rank:
                self._part.absorb(pushes, tickets, whole)
            if self.recorder is not None:
                self.recorder.applied(pushes)
            for push in pushes:
                self.staleness[self.applied - push.seen] += 1
            self.applied += 1
            self.stamp += 1
        return norm

    def _update_by(self, pushes: Sequence[Push], tickets: Tickets) -> tuple[Tensor, bool]:
        """One optimizer update by the sum of gradients: its norm, (2,), and whether it was made."""
        ticket = tickets[max(push.step for push in pushes)][-1]
        counts = [self._rows(push, tickets) if push.counts is None else push.counts for push in pushes]
        counted = float(sum(counts))
        # of rows 1 for all shares of one step; 0 as in `per_count` where there is nothing to learn from
        weights = [_global_rows(push, tickets) / counted if counted else 0.0 for push in pushes]
        alone = self._world.size == 1
        self._sum(pushes, weights)
        if self.shards is not None:
            self.shards.merge(self._row_gradients(pushes, weights), collective=not alone and self._sync_mode.collective)
        finite = all(push.finite for push in pushes)
        if (
            not alone and not self._sync_mode.collective
        ):  # each server has a part of the gradient, and merges when it likes
            norms = [weight * push.norm for push, weight in zip(pushes, weights, strict=True)]
            norm = sum(norms) / len(pushes) if finite else float("inf")
            self._norm = torch.tensor([norm], dtype=torch.float64, device=self._world.device)
            if self.shards is not None:
                self.shards.norm = torch.zeros((), dtype=torch.float64)
        elif not finite and self._arriving:
            torch._foreach_mul_(self._arriving, float("nan"))  # all servers see it in the norm
        known = self._update.apply(ticket.step, ticket.lr)
        if isinstance(known, tuple):
            known = torch.tensor(known, dtype=torch.float64)
        whole = bool(self._update.applied)
        if whole and self._norm is not None and len(pushes) > 1:
            known = torch.tensor([float("nan"), 1.0], dtype=torch.float64)  # the norm of the sum is not known
        self._norm = None
        return known, whole

    @torch.no_grad()
    def _add_changes(self, pushes: Sequence[Push], tickets: Tickets) -> Tensor:
        """Local training: add the changes that trainers made, each weighted by its share of the rows.

        Returns [NaN, steps], as the norm of a whole gradient is not known.
        """
        weights = [self._rows(push, tickets) / _global_rows(push, tickets) for push in pushes]
        tensors = [self._update.kept(field.block.name)[field.key] for field in self._state_fields]
        for push, weight in zip(pushes, weights, strict=True):
            for tensor, difference in zip(
                tensors, views(torch.from_numpy(push.dense).to(self._world.device), self._state_fields), strict=True
            ):
                tensor.add_(difference, alpha=weight)
        if self.shards is not None:
            self.shards.add_changes(self._row_gradients(pushes, weights))
        self._update.refresh(max(len(tickets[push.step]) for push in pushes))
        self._skipped += sum(push.skipped for push in pushes)
        return torch.tensor([float("nan"), sum(push.finite for push in pushes)], dtype=torch.float64)

    def _row_gradients(self, pushes: Sequence[Push], weights: Sequence[float]) -> dict[str, list[RowGradients]]:
        names = self._task.recipe.tables()
        return {
            name: [
                push.rows[name]._replace(weight=weight)
                for push, weight in zip(pushes, weights, strict=True)
                if name in push.rows
            ]
            for name in names
        }

    def _sum(self, pushes: Sequence[Push], weights: Sequence[float]) -> None:
        for number, (push, weight) in enumerate(zip(pushes, weights, strict=True)):
            arrived = torch.from_numpy(push.dense)
            if number == 0 and self.wire is None:
                self._gradients.copy_(arrived)
            elif self._arriving:
                views_of_push = views(arrived.to(self._world.device), self._wire_layout.learning)
                blocks = [
                    block.to(gradient_view.dtype)
                    for block, gradient_view in zip(views_of_push, self._arriving, strict=True)
                ]
                if number:
                    torch._foreach_add_(self._arriving, blocks, alpha=weight)
                else:
                    torch._foreach_copy_(self._arriving, blocks)
            if number == 0 and weight != 1 and self._arriving:
                torch._foreach_mul_(self._arriving, weight)
        for parameter, gradient in zip(self._learning, self._arriving, strict=True):
            parameter.grad = gradient

    def _whole_norm(self, norms: Tensor) -> Tensor:
        """Norms whose norm is that of the whole gradient without tables."""
        if self._norm is not None or self._world.size == 1:
            return norms if self._norm is None else self._norm
        squares = norms.double().square().sum().cpu()
        return self._world.reduce(squares).sqrt().to(norms).reshape(1)

    def _micro_batches(self, ticket: Train, part: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Row ranges of all micro-batches of a ticket, and the first and last + 1 of those of a share."""
        ends = list(pairwise(micro_batch_bounds(ticket.rows, self._micro_batch_rows)))
        return ends, micro_batches_of(len(ends), Shard(part, self._shares))

    def _rows(self, push: Push, tickets: Tickets) -> int:
        """How many rows of global batches a push covers."""
        parts = (self._micro_batches(ticket, push.part) for ticket in tickets[push.step])
        return sum(last - first for ends, part in parts for first, last in ends[slice(*part)])

    # ------------------------------------------------------------ what trainers are given

    def pull(
        self, wanted_ids: Mapping[str, np.ndarray], training: Pull | None, known: int
    ) -> tuple[int, int, np.ndarray | None, dict[str, np.ndarray]]:
        """The stamp, the number of updates, the learning blocks unless their stamp is `known`, and the rows by table.

        With local training, blocks and rows with their optimizer state. An evaluation (`training` is None) makes no new
        rows. Hold `lock` for the call and while its result is read.
        """
        if training is not None and self.recorder is not None:
            self.recorder.pulled(training, self.applied)
        if training is not None and self._sync_mode.local_training:
            records = {name: self.shards.records(name, ids) for name, ids in wanted_ids.items()} if self.shards else {}
            return self.stamp, self.applied, self._blocks_with_state() if known == ANY else None, records
        rows = (
            {name: self.shards.rows(name, ids, training is not None) for name, ids in wanted_ids.items()}
            if self.shards
            else {}
        )
        return self.stamp, self.applied, None if known in (self.stamp, NONE) else self._blocks().cpu().numpy(), rows

    def _blocks(self) -> Tensor:
        """The learning blocks in the format in which they travel."""
        if self.wire is None:
            return self._dense
        if self._outgoing_stamp != self.stamp:
            torch._foreach_copy_(
                views(self._outgoing, self._wire_layout.learning), views(self._dense, self.layout.learning)
            )
            self._outgoing_stamp = self.stamp
        return self._outgoing

    def frozen(self) -> np.ndarray:
        """Blocks that do not learn, and on server 0 all buffers, as bytes."""
        with self.lock:
            return torch.cat([self._frozen.cpu(), *([] if self._world.rank else self._part.whole())]).numpy()

    def buffers(self) -> np.ndarray | None:
        """The buffers that passes change and a rule keeps right, as bytes; None where there are none here. Hold `lock`,
        see `pull`.
        """
        return None if self._world.rank else self._part.values()

    def release(self, uneven: frozenset[str]) -> None:
        """See `ModelBuffers.release`."""
        with self.lock:
            self._part.release(uneven)

    def scale(self) -> float:
        """The factor of the loss that trainers differentiate."""
        return float(self._update.scale(torch.ones((), dtype=torch.float64)))

    def refuse_overfull(self) -> None:
        """Raise the error of a table of which all servers together hold too many rows, where updates do not raise it.

        Collective.
        """
        if self.shards is not None and not self._sync_mode.collective and self._world.size > 1:
            self.shards.refuse_overfull()

    def tables(self) -> dict[str, dict[str, int]]:
        """Per table: `rows` and `bytes` on this server, and the `capacity` of all servers together."""
        return self.shards.sizes() if self.shards else {}

    def counts(self) -> dict[str, int]:
        """See `ShardedTables.life_counts`."""
        with self.lock:
            return self.shards.life_counts() if self.shards else {}

    def _blocks_with_state(self) -> np.ndarray:
        """The learning blocks with their optimizer state, as `state_fields` lays them out."""
        memory = torch.zeros(self._field_bytes, dtype=torch.uint8)
        tensors = [self._update.kept(field.block.name)[field.key] for field in self._state_fields]
        for into, tensor in zip(views(memory, self._state_fields), tensors, strict=True):
            into.copy_(tensor)
        return memory.numpy()

    def columns(self, name: str) -> int:
        """How many numbers a push has for each id."""
        assert self.shards is not None
        return self.shards.columns(name) if self._sync_mode.local_training else self._task.recipe.tables()[name].width

    def owns(self, name: str, ids: np.ndarray) -> bool:
        """Whether all rows of these ids may be on this server."""
        size = self._task.recipe.tables()[name].size
        if not (ids == -1).any() and (not size or not len(ids) or (ids.min() >= 0 and ids.max() < size)):
            return self._world.size == 1 or bool(self.shards is not None and self.shards.owns(name, ids).all())
        return False

    @property
    def statistics_numbers(self) -> int:
        """How many statistics a push has for each of its steps."""
        return self._part.statistics.added_numbers

    @property
    def buffers_numbers(self) -> int:
        """How many numbers of buffers a push has."""
        return self._part.changing_numbers

    @property
    def push_bytes(self) -> int:
        """Bytes of `dense` in a push."""
        return self._field_bytes if self._sync_mode.local_training else self._wire_layout.bytes

    # ------------------------------------------------------------ as a program's state

    def swap_ema(self, on: bool) -> None:
        """See `strategy.Program`."""
        with self.lock:
            self._update.swap_ema(on)
            self._part.statistics.swap_ema(on)
            self.stamp += 1

    def state(self) -> State:
        """See `strategy.Program`."""
        state = self._update.state()
        return state._replace(
            boxes=state.boxes + (buffers(self._part) if self._world.rank == 0 else []),
            scalars=state.scalars | {"skipped": self.skipped()},
        )

    def load(self, source: Source) -> None:
        """See `strategy.Program`."""
        with self.lock:
            self._update.load(source)
            load_buffers(self._part, source, Shard(0, 1))
            self.stamp += 1

    def memory(self) -> Memory:
        """See `strategy.Program`."""
        parameters, gradients, optimizer, tables = self._update.bytes()
        return Memory(parameters, gradients, optimizer, 0, tables=tables)

    def skipped(self) -> int:
        """See `strategy.Program`."""
        return self._update.skipped() + self._skipped

    def first_skipped(self) -> tuple[int, list[str]] | None:
        """See `strategy.Program`."""
        return self._update.first_skipped()

    def _param_shards(self, masters: Mapping[str, Tensor]) -> dict[str, ParamShard]:
        shards = {}
        for memory, blocks in ((self._dense, self.layout.learning), (self._frozen, self.layout.frozen)):
            for block, view in zip(blocks, views(memory, blocks), strict=True):
                numbers = block.of(masters[block.name].detach())
                view.copy_(numbers)
                parameter = nn.Parameter(view, requires_grad=memory is self._dense)
                if memory is self._dense:
                    self._learning.append(parameter)
                master = parameter.data if block.kept is block.dtype else numbers.clone()
                shards[block.name] = ParamShard(parameter, parameter.data, master, block.whole, block.offset)
        return shards


def _global_rows(push: Push, tickets: Tickets) -> int:
    return sum(ticket.rows for ticket in tickets[push.step])
