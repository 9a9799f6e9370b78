"""The program of one process with several model replicas: each computes in a thread, and gradients are summed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.guard import Guard
from dtf.api.sparse_table import Placement
from dtf.api.task import Source, Task
from dtf.core.types import Batch, Evaluated, Memory, Shard, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.sharding import byte_count
from dtf.distributed.world import World
from dtf.model.annotate import section
from dtf.model.compiled_forward import configure
from dtf.model.forward import copy_of, few_rows, loss_dtype, merge_evaluated, rows_of, to_device
from dtf.model.init import cast, whole_model
from dtf.model.loss_terms import per_count, scale_gradients
from dtf.model.memory import row_flops
from dtf.model.module_outputs import ModuleOutputs
from dtf.model.outside_tensors import refuse_kept_copies, refuse_reached
from dtf.model.receive import Receiver
from dtf.model.shared_state import SharedState
from dtf.optim.sharding import Sharding, full_params
from dtf.optim.update import LocalUpdate
from dtf.sparse.make_tables import tables_of
from dtf.strategies.buffers import buffers, load_buffers, own_averages
from dtf.strategies.guard.thread_guard import thread_guard
from dtf.strategies.reading_ahead import ReadsAhead
from dtf.strategies.replica import Replica
from dtf.strategies.replica_digests import compare_replicas, part_of
from dtf.strategies.spmd import microbatch_load
from dtf.strategies.start_check import ALONE, check_evaluation, differing_module
from dtf.strategies.trial_numbers import trial


class DataParallelProgram(ReadsAhead):
    """Replica i computes the i-th share of the micro-batches on `devices[i]`; the first one owns the state.

    `every`: each replica updates itself from the summed gradient; otherwise the first updates and the others copy its
    parameters. Gradients are summed in order of replicas, so results do not depend on which thread is faster.
    """

    follows_memory_format = True

    def __init__(self, task: Task, world: World, devices: list[torch.device], threads: int, every: bool) -> None:
        self.shard, self.shares = Shard(0, 1), len(devices)
        self.micro_batch_rows = task.step.rows_each(len(devices))
        if len(devices) == 1 and devices[0].type == "cpu":
            torch.set_num_threads(threads)  # this thread computes
        self._task, self.devices, self._every, self._world = task, devices, every, world
        # One thread per replica for life: intra-op threads are set per calling thread.
        self._threads = [
            ThreadPoolExecutor(1, f"replica{i}", initializer=torch.set_num_threads, initargs=(threads,))
            for i in range(len(devices) if len(devices) > 1 else 0)
        ]
        self._replicas: list[Replica] = []
        self._receiver = Receiver(task)
        self._updates: list[LocalUpdate] = []
        self._tables = self.tables = tables_of(task, world, Placement.replicated)
        models = [whole_model(task) for _ in devices]
        for model in models[1:]:  # a constructor may draw from what no seed reaches
            _copy_tensors(models[0], model)
        for model, device in zip(models, devices, strict=True):
            masters = cast(model, task.precision, device)
            self._replicas.append(Replica(model, task, device))
            if every or not self._updates:
                params, first = full_params(model, masters), not self._updates
                sharding = Sharding(params=params, tables=self._tables, steps_tables=first)
                options = task.optimizer, task.step.clip_norm, task.precision.loss_scale
                self._updates.append(LocalUpdate(sharding, *options))
        if task.compiled:
            configure(devices[0].type, threads)  # those of a replica
        self._trained = [[p for p in replica.model.parameters() if p.requires_grad] for replica in self._replicas]
        self._synced = True
        self._factors: dict[int, Tensor] = {}  # rows of a global batch -> what its loss is multiplied by
        for replica in self._replicas:
            replica.divided = self.shares > 1
        self._few: Batch | None = None  # for passes of all replicas over the same rows
        self._in_turn = False
        """Whether replicas compute one after the other, because the model draws from generators that they share, or
        its passes change what replicas share, see `SharedState`.
        """

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(self._receiver.train(batch, 0, 0), train=False)
        self._few = few_rows(batch)
        refuse_kept_copies([replica.model for replica in self._replicas], self._task.recipe)
        part = self._part(batch, 0, 8, 0)
        self._in_turn = self._replicas[0].warmup(part, ALONE) or bool(self._replicas[0].shared_changes)
        self.row_flops = row_flops(self._replicas[0].trials)
        for replica in self._replicas[1:]:
            replica.follow(self._replicas[0])
        self._refuse_common_parameters(self._few)
        self.check_replicas()  # constructors may draw from what no seed reaches

    def _refuse_common_parameters(self, rows: Batch) -> None:
        """Raise ConfigError where the loss of a replica comes to parameters of another one. The first one has looked
        for those of others.
        """
        first, *others = self._replicas
        for replica in others[:1]:
            replica.passes(self._part(rows, 0, 4, 1)).run()
            refuse_reached(first.model)

    def memory(self) -> Memory:
        """Of all replicas together."""
        first = self._replicas[0].memory(self._updates[0], *microbatch_load(self._task, self.shares))
        updates, count = len(self._updates), len(self._replicas)
        copy = byte_count(self._trained[0])
        parameters, gradients = (
            updates * whole + (count - updates) * copy for whole in (first.parameters, first.gradients)
        )
        return Memory(
            parameters, gradients, updates * first.optimizer, count * first.activations, tables=updates * first.tables
        )

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        count = len(self._replicas)
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        if self._tables is not None:
            received = self._receiver.join(batch, bounds, lambda part, j: self._receiver.train(part, ticket.step, j))
            batch = self._tables.lookup(received, train=True)
        factor = self._factor(ticket)
        parts = [micro_batches_of(len(bounds) - 1, Shard(i, count)) for i in range(count)]
        sums = self._each(lambda i: self._accumulate(i, ticket, batch, bounds, parts[i], factor))
        counts = [replica.counts for replica in self._replicas if replica.counts is not None]
        if counts:
            ratio = per_count(ticket.rows, _total(counts, self.devices[0]))
            for replica, device in zip(self._replicas, self.devices, strict=True):
                scale_gradients(replica.model.parameters(), replica.row_gradients.values(), ratio.to(device))
        with section("communication"):
            self._sum_gradients()
            self._push_row_gradients([i for i, (first, last) in enumerate(parts) if first < last])
        with section("optimizer"):
            norms = self._each(lambda i: self._updates[i].apply(ticket.step, ticket.lr), len(self._updates))
        applied = self._updates[0].applied
        self._finish_buffers(len(bounds) - 1, applied)
        for replica in self._replicas:
            replica.statistics.finish(applied)
        with section("communication"):
            self._share_parameters()
        self._synced = False
        return StepOutput(_total([s for s in sums if s is not None], self.devices[0]), norms[0])

    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        count = len(self._replicas)
        bounds = micro_batch_bounds(len(batch.ids), self._task.step.evaluation_rows, join=False)
        if self._tables is not None:
            received = self._receiver.join(batch, bounds, lambda part, _: self._receiver.evaluate(part))
            batch = self._tables.lookup(received, train=False)
        parts = [micro_batches_of(len(bounds) - 1, Shard(i, count)) for i in range(count)]

        def part(i: int) -> Evaluated | None:
            first, last = bounds[parts[i][0]], bounds[parts[i][1]]
            if first == last:
                return None
            return self._replicas[i].evaluate(self._part(batch, first, last, i))

        return merge_evaluated([evaluated for evaluated in self._each(part) if evaluated is not None], self.devices[0])

    def trial_eval(self, batch: Batch | None) -> Evaluated | None:
        assert batch is not None
        first = self._replicas[0]
        with trial([replica.model for replica in self._replicas], self._task):
            shared = SharedState(first.model, self._task.recipe)
            evaluated = self.eval_step(copy_of(batch))
            self._in_turn = self._in_turn or bool(shared.changed())
            if first.divided:

                def evaluate(rows: Batch) -> Evaluated:
                    if self._tables is not None:
                        rows = self._tables.lookup(self._receiver.evaluate(rows), train=False)
                    return first.evaluate(self._part(rows, 0, len(rows.ids), 0))

                check_evaluation(evaluate, batch, [first.model], self._task, ALONE, first.instead)
            return evaluated

    def swap_ema(self, on: bool) -> None:
        for update in self._updates:
            update.swap_ema(on)
        self._share_parameters()
        for replica in self._replicas:
            replica.statistics.swap_ema(on)

    def sync(self) -> None:
        if self._synced or len(self._replicas) == 1:
            return
        tensors = [replica.statistics.tensors() for replica in self._replicas]
        for replica in self._replicas:
            replica.statistics.stash()
        for same in zip(*tensors, strict=True):
            mean = torch.stack([t.to(same[0].device) for t in same]).mean(dim=0)
            for t in same:
                t.copy_(mean)
        self._synced = True

    def check_replicas(self) -> None:
        if self.shares == 1 or self._few is None:
            return
        recipe = self._task.recipe
        parts = [[part_of(r, "model", dict(r.model.named_parameters()), recipe)] for r in self._replicas]
        passes = [replica.passes(self._part(self._few, 0, 4, i)) for i, replica in enumerate(self._replicas)]
        compute, instead = self._task.precision.compute, self._replicas[0].instead
        compare_replicas(parts, ["model"], self._world, lambda: differing_module(passes, compute, ALONE), instead)

    def state(self) -> State:
        state = self._updates[0].state()
        averages = [
            box for i, replica in enumerate(self._replicas) for box in own_averages(replica, Shard(i, self.shares))
        ]
        return state._replace(boxes=state.boxes + buffers(self._replicas[0]) + averages)

    @torch.no_grad()
    def load(self, source: Source) -> None:
        for update in self._updates:
            update.load(source)
        self._share_parameters()
        for i, replica in enumerate(self._replicas):
            load_buffers(replica, source, Shard(i, self.shares))

    def guard(self) -> Guard | None:
        if self.shares == 1 or not self._every or self._tables is not None:
            return None

        def factor(ticket: Train, i: int) -> Tensor:
            return self._factor(ticket).to(self.devices[i])

        return thread_guard(
            self._replicas, self._updates, factor, self._part, self._each, self, self._task, self._world
        )

    def _factor(self, ticket: Train) -> Tensor:
        """Of the sum of losses over the rows of a step."""
        one = self._factors.get(ticket.rows)
        if one is None:
            one = torch.full((), 1.0 / ticket.rows, dtype=loss_dtype(self._task), device=self.devices[0])
            self._factors[ticket.rows] = one
        return self._updates[0].scale(one)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [dict(replica.model.named_parameters()) for replica in self._replicas]

    def watch_outputs(self) -> list[ModuleOutputs]:
        return [replica.watch_outputs() for replica in self._replicas]

    def counts(self) -> dict[str, int]:
        return self._tables.life_counts() if self._tables is not None else {}

    def skipped(self) -> int:
        return self._updates[0].skipped()

    def first_skipped(self) -> tuple[int, list[str]] | None:
        return self._updates[0].first_skipped()

    def _part(self, batch: Batch, first: int, last: int, i: int) -> Batch:
        """Rows [first, last) on the device of replica i."""
        return to_device(rows_of(batch, first, last), self.devices[i], self._task)

    def _finish_buffers(self, micro_batches: int, applied: bool | Tensor) -> None:
        """Give all replicas what their micro-batches together make of buffers that the forward pass changes."""
        totals = [total for replica in self._replicas if (total := replica.changing.total()) is not None]
        if totals:
            total = _total(totals, self.devices[0])
            for replica, device in zip(self._replicas, self.devices, strict=True):
                replica.changing.finish(total.to(device), micro_batches, applied)

    def _share_parameters(self) -> None:
        """Give the first replica's parameters to those that do not update their own."""
        for trained in self._trained[len(self._updates) :]:
            torch._foreach_copy_([p.data for p in trained], [p.data for p in self._trained[0]])

    def _accumulate(
        self, i: int, ticket: Train, batch: Batch, bounds: list[int], part: tuple[int, int], factor: Tensor
    ) -> Tensor | None:
        """Replica i computes the micro-batches [first, last) of `part`; the metric sums, None when there are none."""
        replica, shard = self._replicas[i], Shard(i, len(self._replicas))
        first, last = part
        if first == last:  # no other replica waits for this one
            replica.sit_out(len(bounds) - 1, shard.count)
            return None
        rows = self._part(batch, bounds[first], bounds[last], i)
        return replica.accumulate(ticket, rows, bounds, part, shard, factor.to(self.devices[i]))

    def _push_row_gradients(self, computed: list[int]) -> None:
        """Give sparse tables the gradients of their rows, from the replicas `computed` that had rows of the batch."""
        if self._tables is not None:
            parts = [self._replicas[i].row_gradients for i in computed]
            self._tables.backward(
                {name: torch.cat([gradients[name].cpu() for gradients in parts]) for name in parts[0]}
            )

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Sum gradients into the first replica, in order of replicas; with `every`, copy the sums to all."""
        owner = self._trained[0]
        for p, *others in zip(owner, *self._trained[1:], strict=True):
            for other in others:
                if other.grad is not None:
                    p.grad = other.grad.to(p.device) if p.grad is None else p.grad.add_(other.grad.to(p.device))
            for other in others:
                other.grad = p.grad.to(other.device, copy=True) if self._every and p.grad is not None else None

    def _each(self, work: Callable[[int], Any], count: int | None = None) -> list:
        """`work(i)` for each replica, each in its own thread; results in order."""
        if not self._threads:  # a single replica needs no thread of its own
            return [work(0)]
        if self._in_turn:
            return [self._threads[i].submit(work, i).result() for i in range(count or len(self._replicas))]
        futures = [self._threads[i].submit(work, i) for i in range(len(self._replicas) if count is None else count)]
        return [future.result() for future in futures]


@torch.no_grad()
def _copy_tensors(source: nn.Module, into: nn.Module) -> None:
    """Give a model the parameters and buffers of another of its kind, in place."""
    for kind in ("named_parameters", "named_buffers"):
        for (_, value), (_, tensor) in zip(getattr(source, kind)(), getattr(into, kind)(), strict=True):
            tensor.copy_(value)


def _total(sums: list[Tensor], device: torch.device) -> Tensor:
    total = sums[0].to(device)
    for more in sums[1:]:
        total = total + more.to(device)
    return total
