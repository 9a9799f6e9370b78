"""The program of pipelines: every rank computes some stages of the model, micro-batches flow through the ranks.

torch.distributed.pipelining runs such schedules for micro-batches of one fixed shape, exchanged as pickled objects.
Here the last one may be smaller, and batch statistics never see padding; hence the runtime is dtf's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtf.api.guard import Guard
from dtf.api.task import Source, Task
from dtf.core.types import Batch, Evaluated, Memory, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import byte_count, local
from dtf.distributed.world import World
from dtf.model.annotate import section
from dtf.model.forward import (
    ForwardPass,
    as_padding,
    copy_of,
    few_rows,
    leaf_gradients,
    loss_dtype,
    rows_of,
    to_device,
    with_leaves,
)
from dtf.model.loss_terms import per_count, scale_gradients
from dtf.model.memory import Footprint, activations, row_flops
from dtf.model.module_outputs import ModuleOutputs
from dtf.model.receive import EVALUATION, Receiver
from dtf.optim.update import LocalUpdate
from dtf.strategies.buffers import buffers, load_buffers, own_averages
from dtf.strategies.mesh_options import MeshOptions
from dtf.strategies.pass_probes import pass_error, refuse_drawing
from dtf.strategies.pipeline.flow import Flow, MicroBatchHook, nothing
from dtf.strategies.pipeline.messages import PipelineRanks
from dtf.strategies.pipeline.shared_tensors import CopiedBuffers, RenamedSource, SharedTensors
from dtf.strategies.pipeline.stage import Stage, local_parameters
from dtf.strategies.pipeline.stage_guard import stage_guard
from dtf.strategies.pipeline.trials import NOT_THERE, StartTrials
from dtf.strategies.reading_ahead import ReadsAhead
from dtf.strategies.replica_digests import Part, compare_replicas, part_of, shared_parts
from dtf.strategies.spmd import microbatch_load
from dtf.strategies.start_check import check_evaluation, differing_module
from dtf.strategies.step_traffic import mesh_rows, step_passes, step_traffic
from dtf.strategies.trial_numbers import trial
from dtf.strategies.unsaved import Unsaved

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables


class PipelineProgram(ReadsAhead):
    """One or more stages on every rank, and an update for the parameters of these.

    `tables`: the sparse tables that the update holds.
    `exchange`: bytes of parameters and gradients that exist in whole beside slices.
    """

    follows_memory_format = True

    def __init__(
        self,
        stages: list[Stage],
        pipeline: PipelineRanks,
        options: MeshOptions,
        update: LocalUpdate,
        task: Task,
        world: World,
        dims: ParallelDims,
        micro_batch_rows: int,
        tables: ShardedTables | None,
        shared: SharedTensors,
        exchange: int,
    ) -> None:
        self._exchange, self._instead, self._zero = exchange, options.one_share, options.zero
        self._about: dict[str, str] = {}
        self._shared = shared
        self._copied = CopiedBuffers(shared, {stage.index: stage.model for stage in stages})
        for stage in stages:
            shared.refuse_changed(stage.index, stage.changing.names)
        self.tables, self._tables, self._looked_up = tables, tables, task.looked_up
        self._stages = {stage.index: stage for stage in stages}
        self._pipeline, self._update, self._task, self._world, self._dims = pipeline, update, task, world, dims
        self.shard = dims.dp_shard if dims.reads else None
        self.shares, self.micro_batch_rows = dims.dp_shard.count, micro_batch_rows
        self._passes, self._receiver = ForwardPass(task, world.device), Receiver(task)
        last = self._stages.get(pipeline.last)
        if last is not None and last.positions is not None:
            self._passes.carry = last.positions.carry
        self.flow = Flow(self._stages, pipeline, options.schedule, task, self._passes, world.device)
        self._equal_passes = dims.sizes.shard > 1
        """Whether all pipelines have to make the same number of passes: they gather what they divide."""
        self._synced, self._row_bytes = True, 0.0  # bytes of messages that wait in memory
        self._trials: list[tuple[int, Footprint]] = []
        self._again: tuple[StartTrials, Callable[[], Batch]] | None = None  # for passes of all pipelines over one batch
        self._unsaved: Unsaved | None = None
        self._compared: list[str] | None = None  # names of parts that several replicas hold
        self._one = torch.ones((), device=world.device, dtype=loss_dtype(task))
        self._counted = False
        """Whether a rank computes losses with counts."""

    def about(self) -> dict[str, str]:
        return self._about

    def tell(self, about: dict[str, str]) -> None:
        """Add lines to the start-up table, see `about`."""
        self._about |= about

    @property
    def evaluation_micro_batches(self) -> int:
        return self.shares * len(self._pipeline.ranks)  # one for each rank to work on

    def prepare(self, batch: Batch | None) -> Batch | None:
        assert self._dims.broadcast is not None
        return self._dims.broadcast(None if batch is None else to_device(batch, self._world.device, self._task))

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        rows = [rows_of(batch, 0, 4), rows_of(batch, max(0, len(batch.ids) - 4), len(batch.ids))]
        looked_up: list[Batch] = []
        if self._tables is not None:
            received = [self._receiver.train(part, 0, j) for j, part in enumerate(rows)]
            looked_up = [self._tables.lookup(part, train=False) for part in received]

        def part(j: int, end: int = 4) -> Batch:
            whole = looked_up[j] if looked_up else self._receiver.train(copy_of(rows[j]), 0, j)
            return self._leaves(copy_of(rows_of(whole, 0, end)))

        def run(part: Batch, enter: MicroBatchHook, train: bool = True) -> Evaluated:
            return self.flow.run([part], self._one, enter, nothing, train)

        stages, compute, check = list(self._stages.values()), self._task.precision.compute, self._task.start_check
        early = partial(self._pipeline.early_bytes, self._world.rank)
        trials = StartTrials(stages, self._task, self._shared, run, early, self._dims, self._passes, self._instead)
        if self.shares == 1:
            models, scratch = [stage.model for stage in stages], {name for stage in stages for name in stage.scratch}
            peers, train = self._world, trials.passes(lambda: part(0)).run
            self._unsaved = Unsaved(models, self._task.recipe, scratch, train, compute, peers)
        try:
            trials.make(part(0, 2), lambda: part(0), lambda: part(1), compute, self._world, check)
        except RuntimeError as error:
            if (named := pass_error(error)) is None:
                raise
            raise named from error
        rows[:] = [few_rows(part) for part in rows]  # not the whole batch
        self._again = trials, lambda: part(0)
        self._trials = trials.measured
        self._row_bytes = self._pipeline.waiting_bytes(self._world.rank) / self._trials[-1][0]
        self.row_flops = row_flops(self._trials, self._dims.total, self._dims.total_of_segments)
        passes = step_passes(self._task, self._dims, self.micro_batch_rows)
        tied = self._shared.tied_bytes({stage.index: stage.model for stage in stages})
        sent = step_traffic(self._trials, self._dims, passes, self._zero, tied)
        self._about = mesh_rows(sent, self._dims, self._world) | self._about
        counted = self._world.gather(self.flow.counted)
        self._counted = self._world.broadcast(any(counted) if counted else None)

    def memory(self) -> Memory:
        parameters, gradients, optimizer, tables = self._update.bytes()
        held = [local(parameter) for stage in self._stages.values() for parameter in stage.model.parameters()]
        sizes = (byte_count([parameter]) for parameter in held)
        gradients += max(sizes, default=0)  # of the one that is not yet added to those of earlier micro-batches
        buffers = byte_count({id(b): b for stage in self._stages.values() for b in stage.model.buffers()}.values())
        micro_batches, rows = microbatch_load(self._task, self.shares, self.micro_batch_rows)
        # of one stage each
        live = accumulate(1 if action.forward else -1 for action in self.flow.order(micro_batches))
        kept = activations(self._trials, rows, max(live) / len(self._stages))
        under_way = round(self._row_bytes * rows) + self._exchange
        return Memory(parameters + buffers, gradients, optimizer, kept, under_way, tables)

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        first, last = micro_batches_of(len(bounds) - 1, self._dims.dp_shard)
        at = [bound - bounds[first] for bound in bounds[first : last + 1]]
        if self._equal_passes and first == last:  # rows that count for nothing, for what is gathered
            at = [0, len(batch.ids)]
        parts = self._parts(batch, at, lambda part, j: self._receiver.train(part, ticket.step, first + j), train=True)
        if self._again is not None and parts:
            self._again[0].compiled.compare_machine_code(lambda: self._leaves(copy_of(parts[0])))
        self.flow.counts = torch.zeros_like(self._one)
        self._copied.mark()
        self._update.drop_gathered()
        ahead = self._pads(parts, last - first, len(bounds) - 1)
        factor = self._update.scale(self._one / ticket.rows)
        for stage in self._stages.values():
            stage.train()  # before the averages ask which layers are trained
            stage.statistics.begin(last - first, len(bounds) - 1, self.shares)
            stage.changing.begin()
            if self.shares > 1:
                stage.changing.mark()

        def enter(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(ticket.step, first + max(0, j - ahead))
            if j < ahead:
                stage.statistics.begin_padding()
            else:
                stage.statistics.begin_micro_batch(j - ahead)
            stage.changing.begin_micro_batch()

        def leave(stage: Stage, j: int) -> None:
            stage.masks.return_to(ticket.step, first + max(0, j - ahead))

        parts = [self._leaves(part) for part in parts]
        sums, _ = self.flow.run(parts, factor, enter, leave, train=True, padding=range(ahead))
        row_gradients = leaf_gradients(parts[ahead:] or parts, self._looked_up) if 0 in self._stages else {}
        if self._counted:
            self._rescale(ticket.rows, row_gradients)
        if self._tables is not None:
            self._tables.backward(row_gradients)
        self._copied.check()
        for stage in self._stages.values():
            stage.statistics.check_calls(self._instead)
            stage.statistics.end()
            if self.shares > 1:
                stage.changing.check(self._instead)
        self._synced = False
        with section("optimizer"):
            norm = self._update.apply(ticket.step, ticket.lr)
        applied = self._update.applied
        for stage in self._stages.values():
            changed = stage.changing.total()
            if changed is not None:
                self._dims.average(changed)
                changed *= self.shares
            stage.changing.finish(changed, len(bounds) - 1, applied)
            stage.statistics.finish(applied)
        # all know the norm, one reports it
        return StepOutput(self._counted_once(sums), norm if self._world.rank == 0 else (0.0, 0.0))

    def _counted_once(self, sums: Tensor) -> Tensor:
        """The sums, or zeros on a rank beside the one that reports those of a stage."""
        return torch.zeros_like(sums) if self._dims.layer_rank else sums

    def _pads(self, parts: list[Batch], own: int, count: int) -> int:
        """Put one micro-batch that counts for nothing before the `own` ones where another pipeline has one more of the
        `count` of a step. Returns how many were put.
        """
        if not self._equal_passes or own == -(-count // self.shares):
            return 0
        if self._again is not None:
            self._again[0].refuse_padding()
        parts[: len(parts) - own] = [as_padding(parts[0])]
        return 1

    def _rescale(self, rows: int, row_gradients: Mapping[str, Tensor]) -> None:
        """Divide all gradients, those of looked up rows too, by the counts of the loss, over all ranks, in place of
        rows. Collective.
        """
        counts = self._dims.total_of_stages(self.flow.counts.double().reshape(1))
        self._dims.average(counts)
        ratio = per_count(rows, counts[0] * self.shares)
        # stages of one rank may share parameters
        parameters = {p for stage in self._stages.values() for p in stage.model.parameters()}
        scale_gradients(parameters, row_gradients.values(), ratio)

    def _leaves(self, part: Batch) -> Batch:
        """Rows of a batch with gradients for rows of sparse tables, where the first layers are."""
        return with_leaves(part, self._looked_up) if 0 in self._stages else part

    def _parts(
        self, batch: Batch, bounds: list[int], receive: Callable[[Batch, int], Batch], train: bool
    ) -> list[Batch]:
        """The micro-batches as the model gets them. `receive`: see `Receiver.join`.

        All ranks call it, also those that have shapes only: they tell the shapes of messages.
        """
        if self._tables is not None:
            batch = self._tables.lookup(self._receiver.join(batch, bounds, receive), train)
        parts = [rows_of(batch, *ends) for ends in pairwise(bounds)]
        return parts if self._tables is not None else [receive(part, j) for j, part in enumerate(parts)]

    @torch.no_grad()
    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        for stage in self._stages.values():
            stage.train(False)
            stage.changing.begin()
            if self.shares > 1:
                stage.changing.mark()
        bounds = micro_batch_bounds(len(batch.ids), self._task.step.evaluation_rows, join=False)
        parts = self._parts(batch, bounds, lambda part, _: self._receiver.evaluate(part), train=False)

        def enter(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(EVALUATION, int(parts[j].ids[0]))
            stage.changing.begin_micro_batch()

        real = 0 if batch.ids[0] < 0 else len(parts)
        if not self._equal_passes and not real:  # padding: only the lookup of rows needs this rank
            return Evaluated(self.flow.no_sums, None)
        if self._equal_passes:
            parts += [as_padding(parts[-1])] * (len(self._pipeline.ranks) - len(parts))
        padding = range(real, len(parts))
        evaluated = self.flow.run(parts, self._one, enter, nothing, train=False, padding=padding)
        for stage in self._stages.values():
            stage.changing.begin_micro_batch()  # an evaluation changes nothing
            if self.shares > 1:
                stage.changing.check(self._instead)
        rows = None if self._dims.layer_rank else evaluated.rows
        return Evaluated(self._counted_once(evaluated.sums), rows)

    def trial_eval(self, batch: Batch | None) -> Evaluated | None:
        assert batch is not None
        models = [stage.model for stage in self._stages.values()]

        def evaluate(rows: Batch) -> Evaluated:
            return Evaluated(self._dims.total(self.eval_step(rows).sums.double().clone()), None)  # of one rank

        if self._unsaved:
            self._unsaved.evaluate = lambda: self.trial_eval(batch)
        with trial(models, self._task), refuse_drawing(models, NOT_THERE, self._world):
            evaluated = self.eval_step(copy_of(batch))
            if self.shares > 1 and self._again is not None:
                start, peers = self._again[0], self._again[0].peers(self._world)
                check_evaluation(evaluate, batch, models, self._task, peers, self._instead, start.modules, alike=False)
            return evaluated

    def swap_ema(self, on: bool) -> None:
        self._update.swap_ema(on)
        for stage in self._stages.values():
            stage.statistics.swap_ema(on)

    def sync(self) -> None:
        if not self._synced:
            for stage in self._stages.values():
                stage.statistics.average(self._dims.average)
            self._synced = True

    def check_replicas(self) -> str | None:
        if self.shares == 1 or self._again is None:
            return self._unsaved and self._unsaved.warning()
        recipe, place, parts = self._task.recipe, self._dims.place, list[Part]()
        for s in self._stages.values():
            parts += [
                Part(f"stage {s.index} in slice {self._dims.layer_rank}.{place['shard']}", local_parameters(s.model)),
                part_of(s, f"stage {s.index} in slice {self._dims.layer_rank}", {}, recipe),
            ]
        (trials, rows), compute = self._again, self._task.precision.compute
        peers, pipelines = self._world, trials.peers(self._world)
        if self._compared is None:
            self._compared = shared_parts([parts], peers)
        passes, names = [trials.passes(rows)], self._compared
        compare_replicas([parts], names, peers, lambda: differing_module(passes, compute, pipelines), self._instead)
        return None

    def state(self) -> State:
        state = self._update.state()
        share, first, common, seen = self._dims.dp_shard, self._dims.layer_rank == 0, [], set[str]()
        for stage in self._stages.values() if share.index == 0 else ():
            common += self._shared.once(stage.index, buffers(stage, first), seen)
        averages = [box for stage in self._stages.values() for box in own_averages(stage, share, first)]
        return state._replace(boxes=state.boxes + common + averages, private=True)

    def load(self, source: Source) -> None:
        self._update.load(source)
        for stage in self._stages.values():
            load_buffers(stage, RenamedSource(source, self._shared.names[stage.index]), self._dims.dp_shard)

    def guard(self) -> Guard | None:
        def run(part: Batch, ticket: Train, enter: MicroBatchHook) -> Evaluated:
            return self.flow.run([part], self._update.scale(self._one / ticket.rows), enter, nothing, train=True)

        pieces = list(self._stages.values()), run, self._update, self, self._task, self._world, self._dims
        return stage_guard(*pieces) if self.shares > 1 and self._tables is None else None

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def watch_outputs(self) -> list[ModuleOutputs]:
        return [ModuleOutputs(stage.model, root=False, opaque=self._task.compiled) for stage in self._stages.values()]

    def counts(self) -> dict[str, int]:
        return self._tables.life_counts() if self._tables is not None else {}

    def skipped(self) -> int:
        return self._update.skipped()

    def first_skipped(self) -> tuple[int, list[str]] | None:
        return self._update.first_skipped()
