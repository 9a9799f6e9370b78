"""The program of pipelines: every rank computes some stages of the model, micro-batches flow through the ranks.

torch.distributed.pipelining runs such schedules for micro-batches of one shape that is fixed when it is built,
exchanged as pickled objects. Here the last micro-batch may be smaller, as everywhere in dtf, and batch statistics never
see padding; hence the runtime is dtf's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dtf.api.layout import BufferUpdate
from dtf.api.strategy import Program, Update
from dtf.api.task import Source, Task
from dtf.core.types import Batch, Evaluated, Memory, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.p2p import P2PChannel
from dtf.distributed.sharding import byte_count
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing
from dtf.model.annotate import section
from dtf.model.attributes import without_trace
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.changing_buffers import ChangingBuffers, buffers_restored
from dtf.model.forward import (
    ForwardPass,
    batch_norm_error,
    global_rng_error,
    leaf_gradients,
    loss_dtype,
    merge_evaluated,
    rows_of,
    to_device,
    with_leaves,
)
from dtf.model.memory import Footprint, activations
from dtf.model.module_outputs import ModuleOutputs
from dtf.model.receive import EVALUATION, Receiver
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.update import update_applied
from dtf.strategies.buffers import buffers, load_buffers, own_averages
from dtf.strategies.pipeline.messages import AHEAD, UNANSWERED, PipelineRanks, StageMessages
from dtf.strategies.pipeline.schedules import Action, Schedule, answers, order
from dtf.strategies.spmd import microbatch_load

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables


class Stage:
    """A contiguous part of the model: `model` takes and returns the tensors that are live at its ends."""

    def __init__(
        self,
        index: int,
        model: nn.Module,
        task: Task,
        device: torch.device,
        checkpointed: Sequence[str],
        rules: Mapping[str, BufferUpdate],
    ) -> None:
        self.index, self.model = index, model
        self.statistics = BatchNormStatistics(model, task.step.ema)
        self.changing = ChangingBuffers(model, rules, {*self.statistics.names(), *self.statistics.counters()})
        self.masks = SeededDropout(model, task.seed, device)
        apply_activation_checkpointing(model, checkpointed, task.step.remat, self.masks)
        model.train()

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that are no part of the run's state."""
        return self.changing.scratch

    def train(self, mode: bool = True) -> None:
        """Training or evaluation, for all modules."""
        if self.model.training is not mode:
            self.model.train(mode)


_MicroBatchHook = Callable[[Stage, int], None]


def _nothing(stage: Stage, micro_batch: int) -> None:
    pass


_INSTEAD = "strategy.degree=0"
"""What to use where the rows of a model cannot be divided: all ranks in one pipeline."""


class _Held(NamedTuple):
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # of the last stage: what is differentiated
    seed: Tensor | None


class PipelineProgram(Program):
    """One or more stages on every rank, and an update for the parameters of these.

    `table`: the stages as text, for the start-up table. `tables`: the sparse tables that the update holds.
    """

    def __init__(
        self,
        stages: list[Stage],
        pipeline: PipelineRanks,
        schedule: Schedule,
        update: Update,
        task: Task,
        world: World,
        dims: ParallelDims,
        micro_batch_rows: int,
        table: str,
        tables: ShardedTables | None,
    ) -> None:
        self._tables, self._looked_up = tables, tuple(task.recipe.tables())
        self._stages = {stage.index: stage for stage in stages}
        self._pipeline, self._update, self._task, self._world, self._dims = pipeline, update, task, world, dims
        self.shard = dims.dp_shard if dims.broadcast.reads else None
        self.shares, self.micro_batch_rows, self._table = dims.dp_shard.count, micro_batch_rows, table
        self._passes, self._receiver = ForwardPass(task, world.device), Receiver(task)
        shape = len(pipeline.ranks), pipeline.stages // len(pipeline.ranks)
        self._order: Callable[[int], list[Action]] = cache(lambda count: order(schedule, pipeline.place, *shape, count))
        # of the rank before
        self._answers = cache(lambda count: answers(order(schedule, (pipeline.place - 1) % shape[0], *shape, count)))
        self._synced = True
        self._trials: list[tuple[int, Footprint]] = []
        self._row_bytes = 0.0  # of messages that wait in memory
        dtype = loss_dtype(task)
        self._one = torch.ones((), device=world.device, dtype=dtype)
        self._no_sums = torch.zeros(1 + len(task.recipe.train_metrics), device=world.device, dtype=dtype)
        self._no_norm = torch.zeros(2, device=world.device, dtype=dtype)

    def about(self) -> dict[str, str]:
        return {"stages": self._table}

    @property
    def evaluation_micro_batches(self) -> int:
        return self.shares * len(self._pipeline.ranks)  # one for each rank to work on

    def prepare(self, batch: Batch | None) -> Batch | None:
        return self._dims.broadcast(None if batch is None else to_device(batch, self._world.device, self._task))

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        batch = self._receiver.train(rows_of(batch, 0, 4), 0, 0)
        if self._tables is not None:
            batch = self._tables.lookup(batch, train=False)
        with ExitStack() as stack:
            changed = {stage: stack.enter_context(buffers_restored(stage.model)) for stage in self._stages.values()}
            self._trial_passes(batch)
            for stage in changed if self.shares > 1 else ():
                stage.changing.refuse(changed[stage](), _INSTEAD)

    def _trial_passes(self, batch: Batch) -> None:
        """The passes of two steps, without updates. ConfigError for a model that draws from the global generator."""
        drew, self._trials = [], []
        seeded: list[Tensor] = []  # the generator's state after the last seeding

        def enter(stage: Stage, j: int) -> None:
            # whether the stage before on this rank drew
            drew.extend(not torch.equal(state, stage.masks.rng_state()) for state in seeded)
            stage.masks.begin_micro_batch(0, 0)
            seeded[:] = [stage.masks.rng_state()]

        for part in (self._leaves(rows_of(batch, 0, 2)), self._leaves(batch)):
            try:
                with Footprint() as footprint:
                    self._run([part], torch.zeros_like(self._one), enter, _nothing, train=True)
            except ValueError as error:
                raise batch_norm_error(error, len(part.ids)) from error
            gradients = [channel for channel in self._pipeline.backward if channel.target == self._world.rank]
            # there when backward began, but not kept since forward
            footprint.saved_bytes -= sum(channel.byte_count for channel in gradients[-AHEAD:])
            self._trials.append((len(part.ids), footprint))
            for stage in self._stages.values():
                for parameter in stage.model.parameters():
                    parameter.grad = None
        received = [channel.byte_count for channel in self._channels() if channel.target == self._world.rank]
        sent_back = [channel.byte_count for channel in self._pipeline.backward if channel.source == self._world.rank]
        waiting = AHEAD * max(received, default=0) + UNANSWERED * max(sent_back, default=0)
        self._row_bytes = waiting / self._trials[-1][0]
        if any(drew) or not torch.equal(seeded[0], next(iter(self._stages.values())).masks.rng_state()):
            raise global_rng_error("pipeline", "the stages before and after do not draw on")

    def _channels(self) -> list[P2PChannel]:
        return [*self._pipeline.forward, *self._pipeline.backward]

    def memory(self) -> Memory:
        parameters, gradients, optimizer, tables = self._update.bytes()
        sizes = (byte_count([parameter]) for stage in self._stages.values() for parameter in stage.model.parameters())
        gradients += max(sizes, default=0)  # of the one that is not yet added to those of earlier micro-batches
        buffers = byte_count(buffer for stage in self._stages.values() for buffer in stage.model.buffers())
        micro_batches, rows = microbatch_load(self._task, self.shares, self.micro_batch_rows)
        # passes of one stage each
        held = accumulate(1 if action.forward else -1 for action in self._order(micro_batches))
        kept = activations(self._trials, rows, max(held) / len(self._stages))
        return Memory(parameters + buffers, gradients, optimizer, kept, round(self._row_bytes * rows), tables)

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        first, last = micro_batches_of(len(bounds) - 1, self._dims.dp_shard)
        at = [bound - bounds[first] for bound in bounds[first : last + 1]]
        self._update.begin()
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

        def leave(stage: Stage, j: int) -> None:
            stage.masks.return_to(ticket.step, first + j)

        parts = self._parts(batch, at, lambda part, j: self._receiver.train(part, ticket.step, first + j), train=True)
        parts = [self._leaves(part) for part in parts]
        sums, _ = self._run(parts, factor, enter, leave, train=True)
        if self._tables is not None:
            self._tables.backward(leaf_gradients(parts, self._looked_up) if 0 in self._stages else {})
        for stage in self._stages.values():
            stage.statistics.end()
            if self.shares > 1:
                stage.changing.check(_INSTEAD)
        self._synced = False
        with section("optimizer"):
            norm = self._update.apply(ticket.step, ticket.lr)
        applied = update_applied(norm)
        for stage in self._stages.values():
            changed = stage.changing.total()
            if changed is not None:
                self._dims.average(changed)
                changed *= self.shares
            stage.changing.finish(changed, len(bounds) - 1, applied)
            stage.statistics.finish(applied)
        # every rank knows the norm, one reports it
        return StepOutput(sums, norm if self._world.rank == 0 else self._no_norm)

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
        bounds = micro_batch_bounds(len(batch.ids), self._task.step.evaluation_rows, join=False)
        parts = self._parts(batch, bounds, lambda part, _: self._receiver.evaluate(part), train=False)

        def enter(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(EVALUATION, int(parts[j].ids[0]))

        if batch.ids[0] < 0:  # padding: only the lookup of rows needs this rank
            return Evaluated(self._no_sums, None)
        return self._run(parts, self._one, enter, _nothing, train=False)

    def trial_eval(self, batch: Batch | None) -> Evaluated | None:
        with without_trace([stage.model for stage in self._stages.values()]):
            return self.eval_step(batch)

    def _run(
        self, parts: list[Batch], factor: Tensor, enter: _MicroBatchHook, leave: _MicroBatchHook, train: bool
    ) -> Evaluated:
        """Micro-batches through this rank's stages; returns the sums of those whose losses are computed here.

        `factor`: of the loss, shape (). `enter(stage, micro_batch)`: called before each forward pass,
        `leave` before each backward pass. Collective over the pipeline.
        """
        actions = [action for action in self._order(len(parts)) if train or action.forward]
        messages = StageMessages(self._pipeline, actions, parts, self._answers(len(parts)) if train else None)
        held: dict[tuple[int, int], _Held] = {}
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
        for channel in self._channels():
            channel.flush()
        return merge_evaluated(measured, self._world.device)

    def _forward(
        self, s: int, j: int, batch: Batch, factor: Tensor, messages: StageMessages, train: bool
    ) -> tuple[_Held, Evaluated | None]:
        inputs = messages.inputs(s, j) if s else ()
        outputs = self._passes.forward(self._stages[s].model, *(inputs if s else (batch.inputs,)), cast=not s)
        if train:
            self._stages[s].changing.end_micro_batch()
        if s < self._pipeline.last:
            messages.send_outputs(s, j, outputs)
            return _Held(inputs, tuple(t for t in outputs if t.requires_grad), None), None
        outputs, loss = self._passes.losses(outputs, batch)
        total, seed = self._passes.total(loss, batch, factor)
        measured = (
            Evaluated(self._passes.measure(outputs, batch, loss), None)
            if train
            else self._passes.evaluated(outputs, batch, loss)
        )
        return _Held(inputs, (total,), seed), measured

    def _backward(self, s: int, j: int, kept: _Held, messages: StageMessages) -> None:
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

    def state(self) -> State:
        state = self._update.state()
        share = self._dims.dp_shard
        common = [box for stage in self._stages.values() if share.index == 0 for box in buffers(stage)]
        averages = [box for stage in self._stages.values() for box in own_averages(stage, share)]
        return State(state.boxes + common + averages, state.scalars)

    def load(self, source: Source) -> None:
        self._update.load(source)
        for stage in self._stages.values():
            load_buffers(stage, source, self._dims.dp_shard)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def watch_outputs(self) -> list[ModuleOutputs]:
        return [ModuleOutputs(stage.model, root=False) for stage in self._stages.values()]

    def skipped(self) -> int:
        return self._update.skipped()
