"""One copy of the model and its passes over micro-batches. Knows rows and formats, and sums nothing over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.layout import Layout
from dtf.api.task import Task
from dtf.core.consistency import Peers
from dtf.core.types import Batch, Evaluated, Memory, Shard, Train
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.annotate import section
from dtf.model.attributes import Attributes
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.changing_buffers import ChangingBuffers, buffers_restored
from dtf.model.compiled_forward import compile_modules, uncompiled
from dtf.model.forward import (
    ForwardPass,
    as_padding,
    batch_norm_error,
    copy_of,
    leaf_gradients,
    loss_dtype,
    on_device,
    rows_of,
    with_leaves,
)
from dtf.model.init import layout_of
from dtf.model.known_parameters import KnownParameters
from dtf.model.memory import Footprint
from dtf.model.module_outputs import ModuleOutputs
from dtf.model.outside_tensors import OutsideTensors, refuse_kept_copies
from dtf.model.receive import EVALUATION, Receiver
from dtf.model.seeded_calls import seed_calls
from dtf.model.seeded_dropout import SeededDropout
from dtf.model.shared_state import SharedState
from dtf.optim.update import LocalUpdate
from dtf.strategies.compile_trial import CompileTrial
from dtf.strategies.pass_probes import Reach, pass_error, refuse_hooks_on_sums, written_by_pass
from dtf.strategies.replica_memory import Wrapper, replica_memory
from dtf.strategies.replica_start import CLIPPED, PADDED, check_start, watched_pass
from dtf.strategies.start_check import Numbers, Passes
from dtf.strategies.start_padding import padding_error
from dtf.strategies.tensor_parallel.positions import Positions
from dtf.strategies.trial_numbers import counted, output_norms, pass_numbers, passes_without_trace, put_start, row_sizes


class Replica:
    """One copy of the model and its passes over micro-batches; knows rows and formats, nothing of other ranks.

    `forward`, for the last micro-batch of a step, may sum gradients over ranks in its backward pass; the others
    accumulate on the bare model. `sync`: for a model that talks to other ranks in every pass; called before each with
    whether gradients are to be summed. Then all ranks make the same number of passes. `layout`: the recipe's, of a
    model that a strategy has changed since. `reach`: let the backward pass that sums gradients come to all parameters,
    those that the rows of this rank do not use too: others wait for their sums.

    Without sparse tables the replica calls `Recipe.receive`, just before each pass. With them, who looks up rows has
    called it.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        device: torch.device,
        forward: Callable[..., Any] | None = None,
        sync: Callable[[bool], None] | None = None,
        layout: Layout | None = None,
        reach: bool = False,
    ) -> None:
        layout = layout or layout_of(task.recipe, model)
        self.instead = "launcher.processes=1"
        """What to use where rows cannot be divided."""
        self.divided = False
        """Whether others compute other rows."""
        self.receiver = Receiver(task)
        self.outputs: ModuleOutputs | None = None
        self.model, self._forward, self._sync, self._device = model, forward or model, sync, device
        self._passes = ForwardPass(task, device)
        self.statistics = BatchNormStatistics(model, task.step.ema)
        self.changing = ChangingBuffers(model, layout.buffers, {*self.statistics.names(), *self.statistics.counters()})
        self.changing.watches_parameters = sync is None
        self.changing.take_declared(self.statistics)
        self.masks = SeededDropout(model, task.seed, device)
        self._compiled = compile_modules(model, task.compiled, f"step.compile={task.step.compile.value}")
        apply_activation_checkpointing(
            model, modules_to_checkpoint(task.recipe, model, layout, task.step.remat), task.step.remat, self.masks
        )
        self._reach, self._warming = Reach(model, forward if reach else None), False
        self._no_sums = torch.zeros(1 + len(task.recipe.train_metrics), device=device, dtype=loss_dtype(task))
        self.row_gradients: dict[str, Tensor] = {}  # of what was looked up for the last step, by name of the input
        self.trials: list[tuple[int, Footprint]] = []  # of the passes of `warmup`, with their rows
        self.undivided: dict[str, Tensor] = {}  # `projections` of gradients of what this rank holds in whole
        self._cuts = 0 < task.step.micro_batch_rows < task.step.batch_size
        self._task, self._looked_up = task, task.looked_up
        kept = partial(passes_without_trace, [model], task.recipe)
        train = partial(self._trial, micro_batch=0, last=False, compiled=True)
        self.compile_trial = CompileTrial(self._compiled, train, self._trial_evaluation, kept, task)
        self.clipped = ""  # a gradient that does not grow with the loss, as `warmup` found; empty: all do
        self._padded = ""  # a gradient that is not zero for padding rows
        self.start_numbers: Numbers = {}  # of a trial pass of `warmup`
        self.shared_changes: list[str] = []  # by `warmup`, see `SharedState.changed`
        self.pads = False  # whether a full batch has a pass over padding on some rank
        self.counts: Tensor | None = None
        """Of this replica's micro-batches: what the sum of losses is divided by in place of rows, ()."""
        self.positions: Positions | None = None
        model.train()

    def take_positions(self, positions: Positions) -> None:
        """The positions of its rows are divided."""
        positions.follow(self.masks)
        self._passes.carry, self.positions = positions.carry, positions

    @property
    def equal_passes(self) -> bool:
        """Whether all ranks make the same number of passes."""
        return self._sync is not None

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that are no part of the run's state."""
        return self.changing.scratch

    def accumulate(
        self,
        ticket: Train,
        batch: Batch,
        bounds: list[int],
        micro_batches: tuple[int, int],
        shard: Shard,
        factor: Tensor,
    ) -> Tensor:
        """Forward and backward over some micro-batches of a global batch; gradients add up in the parameters.

        `bounds`: where the global batch is cut; `micro_batches`: [first, last) of this share; `batch`: the rows of
        these. The gradient is that of `factor` x (sum of loss over rows), and NaN everywhere when the loss is not
        finite. Returns the metric sums, shape (M,), and leaves the gradients of rows of sparse tables in
        `row_gradients`. Running averages wait for `statistics.finish`.
        """
        first, last = micro_batches
        if not self.model.training:
            self.model.train()
        end = bounds[first + 1] - bounds[first] if first < last else len(batch.ids)
        self.compile_trial.compare_machine_code(lambda: rows_of(batch, 0, end))
        self.statistics.begin(last - first, len(bounds) - 1, shard.count)
        self.counts = None
        self.changing.begin()
        if self.divided:
            self.changing.mark()
        if first == last:  # padding rows: collectives in the backward pass need a pass, the gradient is zero
            self._refuse_padding()
            parts = [with_leaves(self._received(batch, ticket.step, first), self._looked_up)]
            self._begin_random(ticket.step, first)
            sums = [self._pass(parts[0], factor, last=True, padding=True)]
        else:
            at = [bound - bounds[first] for bound in bounds[first : last + 1]]
            parts = [rows_of(batch, *ends) for ends in pairwise(at)] if last - first > 1 else [batch]
            parts = [with_leaves(part, self._looked_up) for part in parts]
            ready = self._received(parts[0], ticket.step, first)
            if self._sync is not None and last - first < -(-(len(bounds) - 1) // shard.count):
                self._refuse_padding()
                self._begin_random(ticket.step, first)
                self.statistics.begin_padding()
                self.changing.begin_micro_batch()
                self._pass(as_padding(ready), factor, last=False, padding=True)
            sums = []
            for j, part in enumerate(parts):
                ready = self._received(part, ticket.step, first + j) if j else ready
                self._begin_random(ticket.step, first + j)
                self.statistics.begin_micro_batch(j)
                self.changing.begin_micro_batch()
                sums.append(self._pass(ready, factor, last=j == len(parts) - 1))
                self.changing.end_micro_batch()
        if self.divided and first < last:
            self.statistics.check_calls(self.instead)
        self.statistics.end()
        if self.divided:
            self.changing.check(self.instead)
        self.row_gradients = leaf_gradients(parts, self._looked_up)
        return sum(sums[1:], start=sums[0])

    def sit_out(self, micro_batches: int, shares: int) -> None:
        """A step without a micro-batch for this replica, where no other rank waits. Its running averages decay."""
        self.model.train()
        self.statistics.begin(0, micro_batches, shares)
        self.counts = None
        self.changing.begin()
        self.statistics.end()

    def watch_outputs(self) -> ModuleOutputs:
        """Begin to sum up the outputs of modules, but not within compiled ones; those of padding do not count."""
        self.outputs = ModuleOutputs(self.model, opaque=self._task.compiled)
        return self.outputs

    def _pass(self, batch: Batch, factor: Tensor, last: bool, padding: bool = False) -> Tensor:
        if self.outputs is not None:
            self.outputs.counts = not padding
        if self._sync is not None:
            self._sync(last)
        with section("forward"):
            outputs, loss = self._passes.losses(
                self._passes.forward(self._forward if last else self.model, batch.inputs), batch
            )
            total, seed = self._passes.seeded(loss, factor)
            if self._reach.active:
                total = self._reach.link(total, last, self._warming)
        with section("backward"):
            total.backward(seed)
            if self._reach.active:
                self._reach.finish(last, self._warming)
        if loss.counts is not None:
            self.counts = loss.counts if self.counts is None else self.counts + loss.counts
        return self._passes.measure(outputs, batch, loss)

    def warmup(self, batch: Batch, peers: Peers) -> bool:
        """Trial passes over some rows, the same on all ranks, whose results are dropped: they leave no trace.
        Collective where passes are, and over `peers` where rows are divided.

        Returns whether the model draws from global generators. DDP lays out its buckets anew at the start of its second
        pass, and the order of a sum over more than two ranks depends on an element's place in a bucket: without two
        passes, the step after a resume would differ from the same step of an unbroken run in the last bits. ConfigError
        for what cannot run: a single row under batch normalisation, and what is wrong where rows are divided.
        """
        self.trials, self._warming, count = [], True, len(batch.ids)
        self._passes.loss.undivided = not self.divided and not self._cuts
        rows = rows_of(batch, 0, 2), rows_of(batch, 0, 4), rows_of(batch, max(0, count - 4), count)
        attributes, known = Attributes(self.model, self._task.recipe), KnownParameters(self.model)
        shared = SharedState(self.model, self._task.recipe)
        outside = OutsideTensors(self.model, self._task.recipe)
        refuse_kept_copies([self.model], self._task.recipe)
        self._passes.watch = None if self._sync else outside.look  # what is gathered is a copy
        try:
            with buffers_restored(self.model) as changed:
                with watched_pass(self.model, self.statistics, self.masks) as calls:
                    self._trial(rows[0], 0, last=not self._reach.active)
                self.changing.take_uneven(self.statistics, calls)
                if self._reach.active:
                    self.trials.clear()
                    self._trial(rows[0], 0)
                known.refuse_new()
                attributes.refuse_read()
                if self._sync is None:
                    known.refuse_moved()
                self._begin_random(0, 0)
                seeded = self.masks.rng_state()
                self.start_numbers = self._trial(rows[1], 0)
                outside.refuse()
                drew = self.masks.draws_elsewhere or self.masks.drew(seeded)
                if self.positions is not None:
                    self.positions.refuse_changed(changed(), self.scratch)
                written = self._written(rows[0]) if self.divided or self._cuts else []
                if self.divided:
                    refuse_hooks_on_sums(self.model, self.instead)
                    known.refuse_changed(self.instead, written)
                    self.changing.refuse(changed(), self.instead)
                    self._check_start(*rows[1:], peers, lambda: [*attributes.changed(), *shared.changed_in_code()])
                    self.changing.refuse(changed(), self.instead)
                self.compile_trial.follow_code(lambda: rows[1])
        except ValueError as error:
            raise batch_norm_error(error, count) from error
        except RuntimeError as error:
            if self.divided:
                known.refuse_changed(self.instead)
            named = pass_error(error)
            if named is None:
                raise
            raise named from error
        finally:
            self._warming, self._passes.watch = False, None
            self.shared_changes = shared.changed()
            shared.restore()
            attributes.restore()
            put_start(self.model, self._task, known.changed())
        return drew

    def _check_start(self, a: Batch, b: Batch, peers: Peers, changed: Callable[[], list[str]]) -> None:
        found = check_start(self._trial, a, b, self.model, self._task, peers, changed, self.instead)
        self.clipped, self._padded = found[CLIPPED], found.get(PADDED, "")
        if self.pads:
            self._refuse_padding()

    def _refuse_padding(self) -> None:
        if self._padded:  # a pass over padding would add to gradients
            raise padding_error(self._padded, self.instead)

    def _written(self, rows: Batch) -> list[str]:
        """The parameters that a pass over these rows writes to. Who shards parameters has looked."""
        return [] if self._sync is not None else written_by_pass(self.model, self._forward_of(rows))

    def _forward_of(self, rows: Batch) -> Callable[[], Any]:
        self._begin_random(0, 0)
        return partial(self._passes.forward, self.model, self._received(copy_of(rows), 0, 0).inputs)

    def _trial_evaluation(self, rows: Batch) -> Numbers:
        """The norms of what the model makes of some rows in an evaluation."""
        return output_norms(self.evaluated_outputs(self._received(copy_of(rows), 0, 0).inputs))

    @torch.no_grad()
    def evaluated_outputs(self, inputs: Any, narrow: bool = True) -> Any:
        """What the model gives in an evaluation. `narrow`: see `ForwardPass.forward`. Collective where passes are."""
        self.model.eval()
        self._begin_random(0, 0)
        outputs = self._passes.forward(self.model, on_device(inputs, self._device), narrow=narrow)
        self.model.train()
        return self._passes.carried(outputs)

    def passes(self, rows: Batch) -> Passes:
        """Trial passes over these rows at any time, without a trace. Collective where passes are."""

        def run() -> Numbers:
            self.model.train()
            with passes_without_trace([self.model], self._task.recipe):
                return self._trial(rows, 0, last=False)

        return Passes(run, lambda: dict(self.model.named_modules()))

    def again(self, rows: Batch, step: int, micro_batch: int, factor: Tensor) -> Tensor:
        """The metric sums (M,) of a micro-batch of a step, without a trace; its gradients are dropped. Collective where
        passes are.
        """
        self.model.train()
        with passes_without_trace([self.model], self._task.recipe):
            part = self._received(rows, step, micro_batch)
            self.changing.begin()
            self._begin_random(step, micro_batch)
            sums = self._pass(part, factor, last=self._sync is not None)
            self.changing.begin_micro_batch()
            self.model.zero_grad()
        return sums

    def follow(self, other: Replica) -> None:
        """Take over what `warmup` has found of another copy of the model."""
        self.masks.seed_as(other.masks)
        seed_calls(self.model, self.masks, other.masks.dropping)
        self.compile_trial.skip_machine_code()
        self.changing.take(self.statistics.release(other.statistics.uneven - self.statistics.uneven))
        self._passes.loss.follow(other._passes.loss)

    def _trial(
        self, rows: Batch, micro_batch: int, last: bool = True, factor: float = 1.0, compiled: bool = False
    ) -> Numbers:
        """Forward and backward over some rows as a micro-batch of step 0. The memory of the first two is measured.
        Returns their sums and the norms of the gradients, which are dropped. Nothing is compiled but as asked.
        """
        part = with_leaves(self._received(copy_of(rows), 0, micro_batch), self._looked_up)
        self.changing.begin()
        self._begin_random(0, micro_batch)
        footprint = Footprint() if len(self.trials) < 2 and not compiled else None
        cut = () if self.positions is None else self.positions.cut
        with counted(footprint, {self.model: cut}), nullcontext() if compiled else uncompiled(self._compiled):
            start = torch.full((), factor, device=self._device)
            sums = self._pass(part, start, last or self._sync is not None)
        compute = None if footprint is None else self._task.precision.compute
        numbers, undivided = pass_numbers(self.model, sums, self.changing.norms(), compute)
        if compiled:
            numbers |= {name: size.item() for name, size in row_sizes(part, self._looked_up).items()}
        self.changing.begin_micro_batch()
        if footprint is not None:
            self.trials.append((len(part.ids), footprint))
            self.undivided = undivided
        return numbers

    def memory(self, update: LocalUpdate, micro_batches: int, rows: int, exchange: int = 0) -> Memory:
        """As `replica_memory`. After `warmup`."""
        wrapper = Wrapper.gathers if self._sync else Wrapper.none if self._forward is self.model else Wrapper.sums
        return replica_memory(self.model, wrapper, self.trials, update, micro_batches, rows, exchange)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluated:
        """A micro-batch with running statistics and without dropout. Of padding nothing counts."""
        if self.model.training:
            self.model.eval()
        if not self._looked_up:
            batch = self.receiver.evaluate(batch)
        self._begin_random(EVALUATION, int(batch.ids[0]))
        self.changing.begin()
        if self.divided:
            self.changing.mark()
        outputs = self._passes.forward(self.model, batch.inputs)
        self.changing.begin_micro_batch()
        if self.divided:
            self.changing.check(self.instead)
        if batch.ids[0] < 0:
            return Evaluated(self._no_sums, None)
        outputs, loss = self._passes.losses(outputs, batch)
        return self._passes.evaluated(outputs, batch, loss)

    def _received(self, part: Batch, step: int, micro_batch: int) -> Batch:
        return part if self._looked_up else self.receiver.train(part, step, micro_batch)

    def _begin_random(self, step: int, micro_batch: int) -> None:
        with self.receiver.lock:
            self.masks.begin_micro_batch(step, micro_batch)
