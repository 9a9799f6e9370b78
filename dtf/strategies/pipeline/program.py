"""The program of pipelines: every rank computes some stages of the model, micro-batches flow through the ranks.

torch.distributed.pipelining runs such schedules for micro-batches of one fixed shape, exchanged as pickled objects.
Here the last one may be smaller, and batch statistics never see padding; hence the runtime is dtf's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtf.api.guard import Guard
from dtf.api.task import Source, Task
from dtf.core.types import Batch, Evaluated, Memory, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import byte_count
from dtf.distributed.world import World
from dtf.model.annotate import section
from dtf.model.forward import (
    ForwardPass,
    copy_of,
    few_rows,
    leaf_gradients,
    loss_dtype,
    merge_evaluated,
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
from dtf.strategies.pass_probes import refuse_drawing
from dtf.strategies.pipeline.messages import PipelineRanks, StageMessages
from dtf.strategies.pipeline.schedules import Action, Schedule, answers, order
from dtf.strategies.pipeline.shared_tensors import CopiedBuffers, RenamedSource, SharedTensors
from dtf.strategies.pipeline.stage import Held, Stage
from dtf.strategies.pipeline.stage_guard import stage_guard
from dtf.strategies.pipeline.trials import INSTEAD, NOT_THERE, StartTrials
from dtf.strategies.reading_ahead import ReadsAhead
from dtf.strategies.replica_digests import compare_replicas, part_of, shared_parts
from dtf.strategies.spmd import microbatch_load
from dtf.strategies.start_check import check_evaluation, differing_module
from dtf.strategies.trial_numbers import trial
from dtf.strategies.unsaved import Unsaved

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables


_MicroBatchHook = Callable[[Stage, int], None]


def _nothing(stage: Stage, micro_batch: int) -> None:
    pass


class PipelineProgram(ReadsAhead):
    """One or more stages on every rank, and an update for the parameters of these.

    `table`: the stages as text, for the start-up table. `tables`: the sparse tables that the update holds.
    """

    follows_memory_format = True

    def __init__(
        self,
        stages: list[Stage],
        pipeline: PipelineRanks,
        schedule: Schedule,
        update: LocalUpdate,
        task: Task,
        world: World,
        dims: ParallelDims,
        micro_batch_rows: int,
        table: str,
        tables: ShardedTables | None,
        shared: SharedTensors,
    ) -> None:
        self._shared = shared
        self._copied = CopiedBuffers(shared, {stage.index: stage.model for stage in stages})
        for stage in stages:
            shared.refuse_changed(stage.index, stage.changing.names)
        self.tables, self._tables, self._looked_up = tables, tables, task.looked_up
        self._stages = {stage.index: stage for stage in stages}
        self._pipeline, self._update, self._task, self._world, self._dims = pipeline, update, task, world, dims
        self.shard = dims.dp_shard if dims.broadcast.reads else None
        self.shares, self.micro_batch_rows, self._table = dims.dp_shard.count, micro_batch_rows, table
        self._passes, self._receiver = ForwardPass(task, world.device), Receiver(task)
        shape = len(pipeline.ranks), pipeline.stages // len(pipeline.ranks)
        self._order: Callable[[int], list[Action]] = cache(lambda count: order(schedule, pipeline.place, *shape, count))
        # of the rank before
        self._answers = cache(lambda count: answers(order(schedule, (pipeline.place - 1) % shape[0], *shape, count)))
        self._synced, self._row_bytes = True, 0.0  # bytes of messages that wait in memory
        self._trials: list[tuple[int, Footprint]] = []
        self._again: tuple[StartTrials, Callable[[], Batch]] | None = None  # for passes of all pipelines over one batch
        self._unsaved: Unsaved | None = None
        self._compared: list[str] | None = None  # names of parts that several replicas hold
        self._one = torch.ones((), device=world.device, dtype=loss_dtype(task))
        self._no_sums = self._one.new_zeros(1 + len(task.recipe.train_metrics))
        self._counts, self._counted = torch.zeros_like(self._one), False
        """What the sum of losses of a step is divided by in place of rows, on the rank that computes losses."""

    def about(self) -> dict[str, str]:
        return {"stages": self._table}

    @property
    def evaluation_micro_batches(self) -> int:
        return self.shares * len(self._pipeline.ranks)  # one for each rank to work on

    def prepare(self, batch: Batch | None) -> Batch | None:
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

        def run(part: Batch, enter: _MicroBatchHook, train: bool = True) -> Evaluated:
            return self._run([part], self._one, enter, _nothing, train)

        stages, compute, check = list(self._stages.values()), self._task.precision.compute, self._task.start_check
        early = partial(self._pipeline.early_bytes, self._world.rank)
        trials = StartTrials(stages, self._task, self._shared, run, early, self._dims, self._passes)
        if self.shares == 1:
            models, scratch = [stage.model for stage in stages], {name for stage in stages for name in stage.scratch}
            peers, train = self._world, trials.passes(lambda: part(0)).run
            self._unsaved = Unsaved(models, self._task.recipe, scratch, train, compute, peers)
        trials.make(part(0, 2), lambda: part(0), lambda: part(1), compute, self._world, check)
        rows[:] = [few_rows(part) for part in rows]  # not the whole batch
        self._again = trials, lambda: part(0)
        self._trials = trials.measured
        self._row_bytes = self._pipeline.waiting_bytes(self._world.rank) / self._trials[-1][0]
        self.row_flops = row_flops(self._trials, self._dims.total)
        counted = self._world.gather(self._counted)
        self._counted = self._world.broadcast(any(counted) if counted else None)

    def memory(self) -> Memory:
        parameters, gradients, optimizer, tables = self._update.bytes()
        sizes = (byte_count([parameter]) for stage in self._stages.values() for parameter in stage.model.parameters())
        gradients += max(sizes, default=0)  # of the one that is not yet added to those of earlier micro-batches
        buffers = byte_count({id(b): b for stage in self._stages.values() for b in stage.model.buffers()}.values())
        micro_batches, rows = microbatch_load(self._task, self.shares, self.micro_batch_rows)
        held = accumulate(1 if action.forward else -1 for action in self._order(micro_batches))  # of one stage each
        kept = activations(self._trials, rows, max(held) / len(self._stages))
        return Memory(parameters + buffers, gradients, optimizer, kept, round(self._row_bytes * rows), tables)

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        first, last = micro_batches_of(len(bounds) - 1, self._dims.dp_shard)
        at = [bound - bounds[first] for bound in bounds[first : last + 1]]
        parts = self._parts(batch, at, lambda part, j: self._receiver.train(part, ticket.step, first + j), train=True)
        if self._again is not None and parts:
            self._again[0].compiled.compare_machine_code(lambda: self._leaves(copy_of(parts[0])))
        self._counts = torch.zeros_like(self._one)
        self._copied.mark()
        factor = self._update.scale(self._one / ticket.rows)
        for stage in self._stages.values():
            stage.train()  # before the averages ask which layers are trained
            stage.statistics.begin(last - first, len(bounds) - 1, self.shares)
            stage.changing.begin()
            if self.shares > 1:
                stage.changing.mark()

        def enter(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(ticket.step, first + j)
            stage.statistics.begin_micro_batch(j)
            stage.changing.begin_micro_batch()

        parts = [self._leaves(part) for part in parts]
        sums, _ = self._run(
            parts, factor, enter, lambda stage, j: stage.masks.return_to(ticket.step, first + j), train=True
        )
        row_gradients = leaf_gradients(parts, self._looked_up) if 0 in self._stages else {}
        if self._counted:
            self._rescale(ticket.rows, row_gradients)
        if self._tables is not None:
            self._tables.backward(row_gradients)
        self._copied.check()
        for stage in self._stages.values():
            stage.statistics.check_calls(INSTEAD)
            stage.statistics.end()
            if self.shares > 1:
                stage.changing.check(INSTEAD)
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
        return StepOutput(sums, norm if self._world.rank == 0 else (0.0, 0.0))  # all know the norm, one reports it

    def _rescale(self, rows: int, row_gradients: Mapping[str, Tensor]) -> None:
        """Divide all gradients, those of looked up rows too, by the counts of the loss, over all ranks, in place of
        rows. Collective.
        """
        counts = self._dims.total(self._counts.double().reshape(1))
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

        if batch.ids[0] < 0:  # padding: only the lookup of rows needs this rank
            return Evaluated(self._no_sums, None)
        evaluated = self._run(parts, self._one, enter, _nothing, train=False)
        for stage in self._stages.values():
            stage.changing.begin_micro_batch()  # an evaluation changes nothing
            if self.shares > 1:
                stage.changing.check(INSTEAD)
        return evaluated

    def trial_eval(self, batch: Batch | None) -> Evaluated | None:
        assert batch is not None
        models = [stage.model for stage in self._stages.values()]

        def evaluate(rows: Batch) -> Evaluated:
            return Evaluated(self._dims.total(self.eval_step(rows).sums.double().clone()), None)

        if self._unsaved:
            self._unsaved.evaluate = lambda: self.trial_eval(batch)
        with trial(models, self._task), refuse_drawing(models, "pipeline", NOT_THERE, self._world):
            evaluated = self.eval_step(copy_of(batch))
            if self.shares > 1 and self._again is not None:
                start, peers = self._again[0], self._again[0].peers(self._world)
                check_evaluation(evaluate, batch, models, self._task, peers, INSTEAD, start.modules, alike=False)
            return evaluated

    def _run(
        self, parts: list[Batch], factor: Tensor, enter: _MicroBatchHook, leave: _MicroBatchHook, train: bool
    ) -> Evaluated:
        """Micro-batches through this rank's stages; returns the sums of those whose losses are computed here.

        `factor`: of the loss, shape (). `enter(stage, micro_batch)`: called before each forward pass,
        `leave` before each backward pass. Collective over the pipeline.
        """
        actions = [action for action in self._order(len(parts)) if train or action.forward]
        messages = StageMessages(self._pipeline, actions, parts, self._answers(len(parts)) if train else None)
        held: dict[tuple[int, int], Held] = {}
        measured = [Evaluated(self._no_sums, None)]
        for number, (forward, s, j) in enumerate(actions):
            messages.open(number)
            if forward:
                enter(self._stages[s], j)
                with section("forward"):
                    kept, evaluated = self._forward(s, j, parts[j], factor, messages, train)
                measured += [] if evaluated is None else [evaluated]
                if train:
                    held[s, j] = kept
                del kept  # activations live as long as the schedule says
            else:
                leave(self._stages[s], j)
                with section("backward"):
                    self._backward(s, j, held.pop((s, j)), messages)
        for channel in (*self._pipeline.forward, *self._pipeline.backward):
            channel.flush()
        return merge_evaluated(measured, self._world.device)

    def _forward(
        self, s: int, j: int, batch: Batch, factor: Tensor, messages: StageMessages, train: bool
    ) -> tuple[Held, Evaluated | None]:
        inputs = messages.inputs(s, j) if s else ()
        outputs = self._passes.forward(self._stages[s].model, *(inputs if s else (batch.inputs,)), cast=not s)
        if train:
            self._stages[s].changing.end_micro_batch()
        if s < self._pipeline.last:
            messages.send_outputs(s, j, outputs)
            return Held(inputs, tuple(t for t in outputs if t.requires_grad), None), None
        outputs, loss = self._passes.losses(outputs, batch)
        total, seed = self._passes.seeded(loss, factor)
        if loss.counts is not None:
            self._counts = self._counts + loss.counts
            self._counted = True
        measured = (
            Evaluated(self._passes.measure(outputs, batch, loss), None)
            if train
            else self._passes.evaluated(outputs, batch, loss)
        )
        return Held(inputs, (total,), seed), measured

    def _backward(self, s: int, j: int, kept: Held, messages: StageMessages) -> None:
        gradients = (kept.seed,) if kept.seed is not None else messages.gradients(s, j)
        if any(output.requires_grad for output in kept.outputs):
            torch.autograd.backward(kept.outputs, gradients)
        if s:
            messages.send_gradients(s, j, kept.inputs)

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
        recipe = self._task.recipe
        parts = [
            part_of(s, f"stage {s.index}", dict(s.model.named_parameters()), recipe) for s in self._stages.values()
        ]
        (trials, rows), compute = self._again, self._task.precision.compute
        peers, pipelines = self._world, trials.peers(self._world)
        if self._compared is None:
            self._compared = shared_parts([parts], peers)
        passes, names = [trials.passes(rows)], self._compared
        compare_replicas([parts], names, peers, lambda: differing_module(passes, compute, pipelines), INSTEAD)
        return None

    def state(self) -> State:
        state = self._update.state()
        share, common, seen = self._dims.dp_shard, [], set[str]()
        for stage in self._stages.values() if share.index == 0 else ():
            common += self._shared.once(stage.index, buffers(stage), seen)
        averages = [box for stage in self._stages.values() for box in own_averages(stage, share)]
        return state._replace(boxes=state.boxes + common + averages, private=True)

    def load(self, source: Source) -> None:
        self._update.load(source)
        for stage in self._stages.values():
            load_buffers(stage, RenamedSource(source, self._shared.names[stage.index]), self._dims.dp_shard)

    def guard(self) -> Guard | None:
        def run(part: Batch, ticket: Train, enter: _MicroBatchHook) -> Evaluated:
            return self._run([part], self._update.scale(self._one / ticket.rows), enter, _nothing, train=True)

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
