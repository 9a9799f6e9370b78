"""The program of pipelines: every rank computes some stages of the model, micro-batches flow through the ranks.

torch.distributed.pipelining runs such schedules for micro-batches of one shape that is fixed when it is built,
exchanged as pickled objects. Here the last micro-batch may be smaller, as everywhere in dtf, and batch statistics never
see padding; hence the runtime is dtf's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dtf.api.strategy import Program, Update
from dtf.api.task import Source, Task
from dtf.core.types import Batch, Evaluated, Memory, State, StepOutput, Train
from dtf.data.samplers import cut, share
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.p2p import P2PChannel, PendingRecv, TensorMeta
from dtf.distributed.sharding import byte_count
from dtf.distributed.strides import axes, dense
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.annotate import section
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.forward import (
    ForwardPass,
    apply_receive,
    batch_norm_error,
    leaf_gradients,
    loss_dtype,
    merge_evaluated,
    refuse_global_rng,
    rows_of,
    to_device,
    with_leaves,
)
from dtf.model.memory import Footprint, activations
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.update import update_applied
from dtf.strategies.pipeline.schedules import Action, Schedule, answers, order
from dtf.strategies.spmd import buffers, buffers_kept, load_buffers, microbatch_load, own_averages

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables

AHEAD = 2
"""Messages that a rank is ready to receive before it needs them, so that they travel while it computes."""

UNANSWERED = 2
"""Gradients that a rank has sent and keeps: what it knows of the rank before is as old."""


class Stage:
    """A contiguous part of the model: `model` takes and returns the tensors that are live at its ends."""

    def __init__(self, index: int, model: nn.Module, task: Task, device: torch.device) -> None:
        self.index, self.model = index, model
        self.statistics = BatchNormStatistics(model, task.step.ema)
        self.masks = SeededDropout(model, task.seed, device)
        apply_activation_checkpointing(
            model, modules_to_checkpoint(task.recipe, task.step.remat), task.step.remat, self.masks
        )
        model.train()

    def train(self, mode: bool = True) -> None:
        """Training or evaluation, for all modules."""
        if self.model.training is not mode:
            self.model.train(mode)


class Line(NamedTuple):
    """One pipeline: its ranks in order of stages. Stage s is on `ranks[s % len(ranks)]`."""

    ranks: list[int]
    place: int  # of this rank among them
    stages: int
    forward: list[P2PChannel]  # from stage s to s + 1
    backward: list[P2PChannel]  # from stage s + 1 to s

    @property
    def last(self) -> int:
        return self.stages - 1


def links(
    lines: list[list[int]], stages: int, rank: int, device: torch.device
) -> tuple[list[P2PChannel], list[P2PChannel]]:
    """The links of the line that `rank` is in, forward and backward; all ranks build those of all lines. Collective."""
    mine: tuple[list[P2PChannel], list[P2PChannel]] = [], []
    for ranks in lines:
        for s in range(stages - 1):
            ends = ranks[s % len(ranks)], ranks[(s + 1) % len(ranks)]
            pair = [P2PChannel(*ends, tag=2 * s, device=device), P2PChannel(*ends[::-1], tag=2 * s + 1, device=device)]
            if rank in ranks:
                mine[0].append(pair[0])
                mine[1].append(pair[1])
    return mine


class _Held(NamedTuple):
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # of the last stage: what is differentiated
    seed: Tensor | None


class PipelineProgram(Program):
    """One or more stages on every rank, an update for the parameters of these. `table`: the stages, for people.

    `tables`: those of the update.
    """

    def __init__(
        self,
        stages: list[Stage],
        line: Line,
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
        self._line, self._update, self._task, self._world, self._dims = line, update, task, world, dims
        self.shard = dims.dp_shard if dims.broadcast.reads else None
        self.shares, self.micro_batch_rows, self._table = dims.dp_shard.count, micro_batch_rows, table
        self._passes = ForwardPass(task, world.device)
        shape = len(line.ranks), line.stages // len(line.ranks)
        self._order: Callable[[int], list[Action]] = cache(lambda count: order(schedule, line.place, *shape, count))
        # of the rank before
        self._answers = cache(lambda count: answers(order(schedule, (line.place - 1) % shape[0], *shape, count)))
        self._settled = True
        self._trials: list[tuple[int, Footprint]] = []
        self._row_bytes = 0.0  # of messages that wait in memory
        dtype = loss_dtype(task)
        self._one = torch.ones((), device=world.device, dtype=dtype)
        self._nothing = torch.zeros(1 + len(task.recipe.train_metrics), device=world.device, dtype=dtype)
        self._unsaid = torch.zeros(2, device=world.device, dtype=dtype)

    def about(self) -> dict[str, str]:
        return {"stages": self._table}

    def prepare(self, batch: Batch | None) -> Batch | None:
        return apply_receive(
            self._dims.broadcast(None if batch is None else to_device(batch, self._world.device, self._task)),
            self._task,
        )

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(batch, train=False)
        with ExitStack() as stack:
            for stage in self._stages.values():
                stack.enter_context(buffers_kept(stage, self.shares > 1, "strategy.degree=0"))
            self._try(batch)

    def _try(self, batch: Batch) -> None:
        """Two steps' passes without their updates."""
        drew, self._trials = [], []
        seeded: list[Tensor] = []

        def enter(stage: Stage, j: int) -> None:
            # by the stage before on this rank
            drew.extend(not torch.equal(state, stage.masks.rng_state()) for state in seeded)
            stage.masks.begin_micro_batch(0, 0)
            seeded[:] = [stage.masks.rng_state()]

        for part in (self._leaves(rows_of(batch, 0, 2)), self._leaves(rows_of(batch, 0, 4))):
            try:
                with Footprint() as footprint:
                    self._run([part], torch.zeros_like(self._one), enter, train=True)
            except ValueError as error:
                raise batch_norm_error(error, len(part.ids)) from error
            gradients = [link for link in self._line.backward if link.target == self._world.rank]
            # there when backward began, but not kept since forward
            footprint.saved_bytes -= sum(link.byte_count for link in gradients[-AHEAD:])
            self._trials.append((len(part.ids), footprint))
            for stage in self._stages.values():
                for parameter in stage.model.parameters():
                    parameter.grad = None
        received = [
            link.byte_count for link in (*self._line.forward, *self._line.backward) if link.target == self._world.rank
        ]
        sent_back = [link.byte_count for link in self._line.backward if link.source == self._world.rank]
        self._row_bytes = (AHEAD * max(received, default=0) + UNANSWERED * max(sent_back, default=0)) / self._trials[
            -1
        ][0]
        if any(drew) or not torch.equal(seeded[0], next(iter(self._stages.values())).masks.rng_state()):
            raise refuse_global_rng("pipeline", "the stages before and after do not draw on")

    def memory(self) -> Memory:
        parameters, gradients, optimizer, tables = self._update.bytes()
        sizes = (byte_count([parameter]) for stage in self._stages.values() for parameter in stage.model.parameters())
        gradients += max(sizes, default=0)  # one that is not yet added to those of earlier micro-batches
        buffers = byte_count(buffer for stage in self._stages.values() for buffer in stage.model.buffers())
        micro_batches, rows = microbatch_load(self._task, self.shares, self.micro_batch_rows)
        # passes of one stage each
        held = accumulate(1 if action.forward else -1 for action in self._order(micro_batches))
        kept = activations(self._trials, rows, max(held) / len(self._stages))
        return Memory(parameters + buffers, gradients, optimizer, kept, round(self._row_bytes * rows), tables)

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = cut(ticket.rows, self.micro_batch_rows)
        first, last = share(len(bounds) - 1, self._dims.dp_shard)
        at = [bound - bounds[first] for bound in bounds[first : last + 1]]
        self._update.begin()
        factor = self._update.scale(self._one / ticket.rows)
        for stage in self._stages.values():
            stage.train()  # before the averages ask which layers are trained
            stage.statistics.begin(last - first, len(bounds) - 1, self.shares)

        def enter(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(ticket.step, first + j)
            stage.statistics.begin_micro_batch(j)

        if self._tables is not None:
            batch = self._tables.lookup(batch, train=True)
        parts = [self._leaves(rows_of(batch, *ends)) for ends in pairwise(at)]
        sums, _ = self._run(parts, factor, enter, train=True)
        if self._tables is not None:
            self._tables.backward(leaf_gradients(parts, self._looked_up) if 0 in self._stages else {})
        for stage in self._stages.values():
            stage.statistics.end()
        self._settled = False
        with section("optimizer"):
            norm = self._update.apply(ticket.step, ticket.lr)
        for stage in self._stages.values():
            stage.statistics.finish(update_applied(norm))
        # every rank knows the norm, one tells it
        return StepOutput(sums, norm if self._world.rank == 0 else self._unsaid)

    def _leaves(self, part: Batch) -> Batch:
        """Rows of a batch with gradients for rows of sparse tables, where the first layers are."""
        return with_leaves(part, self._looked_up) if 0 in self._stages else part

    @torch.no_grad()
    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(batch, train=False)
        for stage in self._stages.values():
            stage.train(False)
        # as many parts as there are ranks to work on them
        bounds = cut(len(batch.ids), -(-len(batch.ids) // len(self._line.ranks)))
        return self._run(
            [rows_of(batch, *ends) for ends in pairwise(bounds)], self._one, lambda stage, j: None, train=False
        )

    def _run(self, parts: list[Batch], factor: Tensor, enter: Callable[[Stage, int], None], train: bool) -> Evaluated:
        """Micro-batches through this rank's stages; returns what is measured of those whose losses are computed here.

        Collective over the line.
        """
        actions = [action for action in self._order(len(parts)) if train or action.forward]
        mail = _Mail(self._line, actions, parts, self._answers(len(parts)) if train else None)
        held: dict[tuple[int, int], _Held] = {}
        found = [Evaluated(self._nothing, None)]
        for number, (forward, s, j) in enumerate(actions):
            mail.open(number)
            if forward:
                enter(self._stages[s], j)
                with section("forward"):
                    kept, more = self._forward(s, j, parts[j], factor, mail, train)
                found += [] if more is None else [more]
                if train:
                    held[s, j] = kept
                del kept  # activations live as long as the schedule says
            else:
                with section("backward"):
                    self._backward(s, j, held.pop((s, j)), mail)
        for link in (*self._line.forward, *self._line.backward):
            link.flush()
        return merge_evaluated(found, self._world.device)

    def _forward(
        self, s: int, j: int, batch: Batch, factor: Tensor, mail: _Mail, train: bool
    ) -> tuple[_Held, Evaluated | None]:
        inputs = mail.inputs(s, j) if s else ()
        outputs = self._passes.forward(self._stages[s].model, *(inputs if s else (batch.inputs,)), cast=not s)
        if s < self._line.last:
            mail.pass_on(s, j, outputs)
            return _Held(inputs, tuple(t for t in outputs if t.requires_grad), None), None
        outputs, loss = self._passes.losses(outputs, batch)
        total, seed = self._passes.total(loss, batch, factor)
        measured = (
            Evaluated(self._passes.measure(outputs, batch, loss), None)
            if train
            else self._passes.evaluated(outputs, batch, loss)
        )
        return _Held(inputs, (total,), seed), measured

    def _backward(self, s: int, j: int, kept: _Held, mail: _Mail) -> None:
        gradients = (kept.seed,) if kept.seed is not None else mail.gradients(s, j)
        if any(output.requires_grad for output in kept.outputs):
            torch.autograd.backward(kept.outputs, gradients)
        if s:
            mail.pass_back(s, j, kept.inputs)

    def swap_ema(self, on: bool) -> None:
        self._update.swap_ema(on)
        for stage in self._stages.values():
            stage.statistics.swap_ema(on)

    def sync(self) -> None:
        if not self._settled:
            for stage in self._stages.values():
                stage.statistics.average(self._dims.average)
            self._settled = True

    def state(self) -> State:
        state = self._update.state()
        share = self._dims.dp_shard
        kept = [box for stage in self._stages.values() if share.index == 0 for box in buffers(stage)]
        return State(
            state.boxes + kept + [box for stage in self._stages.values() for box in own_averages(stage, share)],
            state.scalars,
        )

    def load(self, source: Source) -> None:
        self._update.load(source)
        for stage in self._stages.values():
            load_buffers(stage, source, self._dims.dp_shard)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def skipped(self) -> int:
        return self._update.skipped()


class _Mail:
    """The messages of one rank in one run of its actions. Neighbouring stages are always on different ranks.

    What was sent stays in memory until an answer shows that it was received: its gradient, or of a gradient, inputs
    that were computed after it. `answers`: see schedules; None: nothing comes back.
    """

    def __init__(
        self, line: Line, actions: list[Action], parts: list[Batch], answers: dict[tuple[int, int], int] | None
    ) -> None:
        self._line, self._actions, self._answers = line, actions, answers or {}
        self._keys = [(_form(part.inputs), answers is not None) for part in parts]
        self._wanted = [
            n for n, action in enumerate(actions) if (action.stage if action.forward else action.stage < line.last)
        ]
        self._begun = 0  # of what is wanted
        self._arrivals: dict[Action, PendingRecv] = {}
        self._sent: dict[tuple[int, int], list[TensorMeta]] = {}  # what went forward and gets gradients back

    def open(self, number: int) -> None:
        """Before action `number`: begin to receive what it and the next few need, as far as it is known what that looks
        like.
        """
        while self._begun < len(self._wanted):
            at = self._wanted[self._begun]
            if at > number and len(self._arrivals) >= AHEAD:
                return
            forward, s, j = action = self._actions[at]
            link = self._line.forward[s - 1] if forward else self._line.backward[s]
            if forward:
                forms = link.meta(self._keys[j]) if at == number or link.has_meta(self._keys[j]) else None
            else:
                forms = self._sent.pop((s, j), None)
            if forms is None:
                return
            self._arrivals[action] = link.receive(forms)
            self._begun += 1

    def inputs(self, s: int, j: int) -> tuple[Tensor, ...]:
        """What the stage before has sent on; leaves of this stage's graph."""
        forms = self._line.forward[s - 1].meta(self._keys[j])
        tensors = self._arrivals.pop(Action(True, s, j)).wait()
        self._line.backward[s - 1].free(self._answers.get((s - 1, j), 0))
        return tuple(tensor.requires_grad_(form.gradient) for tensor, form in zip(tensors, forms, strict=True))

    def pass_on(self, s: int, j: int, outputs: tuple[Tensor, ...]) -> None:
        sent = [dense(tensor) for tensor in outputs]
        self._line.forward[s].send(self._keys[j], sent)
        self._sent[s, j] = [TensorMeta.of(tensor) for tensor in sent if tensor.requires_grad]

    def gradients(self, s: int, j: int) -> tuple[Tensor, ...]:
        """Of a stage's outputs, from the stage after."""
        gradients = self._arrivals.pop(Action(False, s, j)).wait()
        self._line.forward[s].free(j + 1)
        return gradients

    def pass_back(self, s: int, j: int, inputs: tuple[Tensor, ...]) -> None:
        """The gradients of a stage's inputs; zeros where it did not use one."""
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        self._line.backward[s - 1].send(
            None, [torch.zeros_like(t) if t.grad is None else dense(t.grad, axes(t)) for t in wanted]
        )


def _form(inputs: Any) -> Any:
    """What decides the shapes of everything that follows from a micro-batch's inputs."""
    named = inputs if isinstance(inputs, dict) else {"": inputs}
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in named.items())
