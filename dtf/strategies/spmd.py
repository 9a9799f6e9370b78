"""The program of strategies in which every rank runs the whole model on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtf.api.sparse_table import Placement
from dtf.api.strategy import Program, Update
from dtf.api.task import Source, Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Evaluated, Memory, Shard, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import byte_count, is_dtensor, local
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.annotate import section
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.error_context import name_failing_module
from dtf.model.forward import (
    ForwardPass,
    batch_norm_error,
    global_rng_error,
    leaf_gradients,
    loss_dtype,
    rows_of,
    to_device,
    with_leaves,
)
from dtf.model.init import cast, init_model
from dtf.model.memory import Footprint, activations
from dtf.model.module_outputs import ModuleOutputs
from dtf.model.receive import EVALUATION, Receiver
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.update import LocalUpdate, full_params, update_applied
from dtf.sparse.make_tables import tables_of
from dtf.strategies.buffers import buffers, buffers_kept, load_buffers, own_averages

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables


class Replica:
    """One copy of the model and its passes over micro-batches; knows rows and formats, nothing of other ranks.

    `forward`, for the last micro-batch of a step, may sum gradients over ranks in its backward pass; the others
    accumulate on the bare model. `sync`: for a model that talks to other ranks in every pass; called before each with
    whether gradients are to be summed. Then all ranks make the same number of passes.

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
    ) -> None:
        self.receiver = Receiver(task)
        self.outputs: ModuleOutputs | None = None
        self.model, self._forward, self._sync, self._device = model, forward or model, sync, device
        self._passes = ForwardPass(task, device)
        self.statistics = BatchNormStatistics(model, task.step.ema)
        self.masks = SeededDropout(model, task.seed, device)
        apply_activation_checkpointing(
            model, modules_to_checkpoint(task.recipe, task.step.remat), task.step.remat, self.masks
        )
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._looked_up = tuple(task.recipe.tables())
        self._no_sums = torch.zeros(1 + len(task.recipe.train_metrics), device=device, dtype=loss_dtype(task))
        self.row_gradients: dict[str, Tensor] = {}  # of what was looked up for the last step, by name of the input
        self._trials: list[tuple[int, Footprint]] = []  # of the passes of `warmup`, with their rows
        self.undivided: dict[str, Tensor] = {}  # norms of its gradients of parameters that this rank holds in whole
        model.train()

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
        self.statistics.begin(last - first, len(bounds) - 1, shard.count)
        if first == last:  # padding rows: collectives in the backward pass need a pass, the gradient is zero
            parts = [with_leaves(self._received(batch, ticket.step, first), self._looked_up)]
            sums = [self._pass(parts[0], factor, last=True, padding=True)]
        else:
            at = [bound - bounds[first] for bound in bounds[first : last + 1]]
            parts = [rows_of(batch, *ends) for ends in pairwise(at)] if last - first > 1 else [batch]
            parts = [with_leaves(part, self._looked_up) for part in parts]
            ready = self._received(parts[0], ticket.step, first)
            # another rank has one more, and all make the same number of passes
            if self._sync is not None and last - first < -(-(len(bounds) - 1) // shard.count):
                self.statistics.begin_padding()
                self._pass(ready._replace(weight=torch.zeros_like(ready.weight)), factor, last=False, padding=True)
            sums = []
            for j, part in enumerate(parts):
                ready = self._received(part, ticket.step, first + j) if j else ready
                self._begin_random(ticket.step, first + j)
                self.statistics.begin_micro_batch(j)
                sums.append(self._pass(ready, factor, last=j == len(parts) - 1))
        self.statistics.end()
        self.row_gradients = leaf_gradients(parts, self._looked_up)
        return sum(sums[1:], start=sums[0])

    def sit_out(self, micro_batches: int, shares: int) -> None:
        """A step without a micro-batch for this replica, where no other rank waits for its passes.

        Its running averages decay all the same.
        """
        self.model.train()
        self.statistics.begin(0, micro_batches, shares)
        self.statistics.end()

    def watch_outputs(self) -> ModuleOutputs:
        """Begin to sum up the outputs of modules; those of padding do not count."""
        self.outputs = ModuleOutputs(self.model)
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
            total, seed = self._passes.total(loss, batch, factor)
        with section("backward"):
            if last or self._sync is not None:
                total.backward(seed)
            else:
                # Not backward(): hooks that sum gradients over ranks must see each parameter once a step (DDP with a
                # static graph counts).
                inputs = [*self._trained, *(batch.inputs[name] for name in self._looked_up)]
                gradients = torch.autograd.grad(total, inputs, seed, allow_unused=True)
                for parameter, gradient in zip(inputs, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self._passes.measure(outputs, batch, loss)

    def warmup(self, batch: Batch, spread: bool) -> bool:
        """Two passes, over two rows and over all, whose results are dropped. Collective where passes are.

        Returns whether the model drew from the global generator. DDP lays out its buckets anew at the start of its
        second pass, and the order of a sum over more than two ranks depends on an element's place in a bucket: without
        this, the step after a resume would differ from the same step of an unbroken run in the last bits. ConfigError
        for what cannot run: a single row under batch normalisation, and, if the rows are divided (`spread`), buffers
        that the forward pass changes.
        """
        state_before, self._trials = None, []
        try:
            with buffers_kept(self, spread, "launcher.processes=1"):
                for rows in (rows_of(batch, 0, 2), batch):
                    part = with_leaves(self._received(rows, 0, 0), self._looked_up)
                    self.masks.begin_micro_batch(0, 0)
                    state_before = self.masks.rng_state()
                    with Footprint() as footprint:
                        self._pass(part, torch.ones((), device=self._device), last=True)
                    self._trials.append((len(part.ids), footprint))
                    self.undivided = {
                        name: p.grad.norm()
                        for name, p in self.model.named_parameters()
                        if p.grad is not None and not is_dtensor(p)
                    }
                    for parameter in self._trained:
                        parameter.grad = None
        except ValueError as error:
            raise batch_norm_error(error, len(batch.ids)) from error
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            raise ConfigError(
                "some parameters got no gradient in a step; set strategy.find_unused_parameters=true"
            ) from error
        return state_before is not None and not torch.equal(state_before, self.masks.rng_state())

    def memory(self, update: Update, micro_batches: int, rows: int) -> Memory:
        """Bytes of a step with this number of micro-batches, of this number of rows each. After `warmup`."""
        parameters, gradients, optimizer, tables = update.bytes()
        # otherwise the wrapper of the model knows where gradients wait
        if self._forward is self.model and self._sync is None:
            gradients += pending_grad_bytes(
                [byte_count([parameter]) for parameter in map(local, self._trained)], micro_batches
            )
        buffers = byte_count(local(buffer) for buffer in self.model.buffers())
        return Memory(parameters + buffers, gradients, optimizer, activations(self._trials, rows), tables=tables)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluated:
        """A micro-batch with running statistics and without dropout. Of padding nothing counts."""
        if self.model.training:
            self.model.eval()
        if not self._looked_up:
            batch = self.receiver.evaluate(batch)
        self._begin_random(EVALUATION, int(batch.ids[0]))
        outputs = self._passes.forward(self.model, batch.inputs)
        if batch.ids[0] < 0:
            return Evaluated(self._no_sums, None)
        outputs, loss = self._passes.losses(outputs, batch)
        return self._passes.evaluated(outputs, batch, loss)

    def _received(self, part: Batch, step: int, micro_batch: int) -> Batch:
        return part if self._looked_up else self.receiver.train(part, step, micro_batch)

    def _begin_random(self, step: int, micro_batch: int) -> None:
        with self.receiver.lock:
            self.masks.begin_micro_batch(step, micro_batch)


class Spmd(Program):
    """A replica on every rank, and an update that makes them agree.

    `dims`: given where several ranks compute one replica. Then gradients arrive summed over replicas, otherwise
    averaged over ranks, as torch's wrappers do. `exchange`: bytes in flight between ranks, see Memory. `tables`: the
    sparse tables that the update holds.
    """

    def __init__(
        self,
        replica: Replica,
        update: Update,
        task: Task,
        world: World,
        dims: ParallelDims | None = None,
        exchange: int = 0,
        tables: ShardedTables | None = None,
    ) -> None:
        self._tables = tables
        self._share = dims.dp_shard if dims else Shard(world.rank, world.size)
        self._reads = dims is None or dims.broadcast.reads
        self.shard = self._share if self._reads else None
        self.shares = self._share.count
        self.micro_batch_rows = task.step.rows_each(self.shares)
        self._replica, self._update, self._task, self._world, self._dims = replica, update, task, world, dims
        self._average = dims.average if dims else world.average
        self._synced, self._exchange = True, exchange
        self._no_norm = torch.zeros(2, device=world.device)
        self._factor = torch.full((), 1.0 if dims else world.size, device=world.device, dtype=loss_dtype(task))

    def prepare(self, batch: Batch | None) -> Batch | None:
        if batch is not None:
            batch = to_device(batch, self._world.device, self._task)
        return self._dims.broadcast(batch) if self._dims else batch

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(self._replica.receiver.train(batch, 0, 0), train=False)
        if self._dims is None:
            self._replica.warmup(rows_of(batch, 0, 4), spread=self.shares > 1)
            return
        with name_failing_module(self._replica.model), self._replica.masks.record_input_norms() as seen:
            drew = self._replica.warmup(rows_of(batch, 0, 4), spread=self.shares > 1)
        if drew:
            raise global_rng_error("tensor", "and ranks that divide its channels would draw alike for different ones")
        self._dims.check_alike(seen | {f"gradients of {name}": norm for name, norm in self._replica.undivided.items()})

    def memory(self) -> Memory:
        return self._replica.memory(self._update, *microbatch_load(self._task, self.shares))._replace(
            exchange=self._exchange
        )

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        micro_batches = micro_batches_of(len(bounds) - 1, self._share)
        self._update.begin()
        if self._tables is not None:
            batch = self._tables.lookup(self._received(ticket, batch, bounds, micro_batches), train=True)
        factor = self._update.scale(self._factor / ticket.rows)
        sums = self._replica.accumulate(ticket, batch, bounds, micro_batches, self._share, factor)
        if self._tables is not None:
            self._tables.backward(self._replica.row_gradients)
        self._synced = False
        with section("optimizer"):
            norm = self._update.apply(ticket.step, ticket.lr)
        self._replica.statistics.finish(update_applied(norm))
        # every rank knows the norm, one reports it
        return StepOutput(self._counted_once(sums), norm if self._world.rank == 0 else self._no_norm)

    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(self._replica.receiver.evaluate(batch), train=False)
        sums, rows = self._replica.evaluate(batch)
        return Evaluated(self._counted_once(sums), rows if self._reads else None)

    def _received(self, ticket: Train, batch: Batch, bounds: list[int], micro_batches: tuple[int, int]) -> Batch:
        receiver, (first, last) = self._replica.receiver, micro_batches
        at = [bound - bounds[first] for bound in bounds[first : last + 1]]
        return receiver.join(batch, at, lambda part, j: receiver.train(part, ticket.step, first + j))

    def _counted_once(self, sums: Tensor) -> Tensor:
        """The sums, or zeros on a rank whose rows another rank reports."""
        return sums if self._reads else torch.zeros_like(sums)

    def swap_ema(self, on: bool) -> None:
        self._update.swap_ema(on)
        self._replica.statistics.swap_ema(on)

    def sync(self) -> None:
        if not self._synced:
            self._replica.statistics.average(self._average)
            self._synced = True

    def state(self) -> State:
        state = self._update.state()
        common = buffers(self._replica, self._reads) if self._share.index == 0 else []
        return State(state.boxes + common + own_averages(self._replica, self._share, self._reads), state.scalars)

    def load(self, source: Source) -> None:
        self._update.load(source)
        load_buffers(self._replica, source, self._share)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def watch_outputs(self) -> list[ModuleOutputs]:
        return [self._replica.watch_outputs()]

    def skipped(self) -> int:
        return self._update.skipped()


def single_process(task: Task, world: World) -> Program:
    """The program of a run with one rank: the bare model, the same under every strategy."""
    model = init_model(task.recipe, task.seed, task.weights)
    masters = cast(model, task.precision, world.device)
    tables = tables_of(task, world, Placement.replicated)
    update = LocalUpdate(
        full_params(model, masters), task.optimizer, task.step.clip_norm, task.precision.loss_scale, tables=tables
    )
    return Spmd(Replica(model, task, world.device), update, task, world, tables=tables)


def microbatch_load(task: Task, shares: int, micro_batch_rows: int = 0) -> tuple[int, int]:
    """(micro-batches of the largest share, rows of the largest micro-batch).

    `micro_batch_rows=0`: as `step.micro_batch_rows` says, or one micro-batch for each share.
    """
    bounds = micro_batch_bounds(task.step.batch_size, micro_batch_rows or task.step.rows_each(shares))
    return -(-(len(bounds) - 1) // shares), max(b - a for a, b in pairwise(bounds))


def pending_grad_bytes(sizes: list[int], micro_batches: int) -> int:
    """Bytes of a micro-batch's gradients that wait to be added to those before it, see `Replica._pass`.

    `sizes`: bytes of each parameter's gradient.
    """
    return 0 if micro_batches == 1 else max(sizes) if micro_batches == 2 else sum(sizes)
