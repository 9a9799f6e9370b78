"""The program of strategies in which every rank runs the whole model on its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dtf.api.sparse_table import Placement
from dtf.api.strategy import Program, Update
from dtf.api.task import Source, Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Box, Evaluated, Memory, Shard, State, StepOutput, Train
from dtf.data.samplers import cut, share
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import byte_count, is_dtensor, local, offset
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.annotate import section
from dtf.model.batch_statistics import EMA_SUFFIX, BatchNormStatistics
from dtf.model.ema import EMA_PREFIX
from dtf.model.error_context import name_failing_module
from dtf.model.forward import (
    ForwardPass,
    apply_receive,
    batch_norm_error,
    leaf_gradients,
    loss_dtype,
    refuse_global_rng,
    rows_of,
    to_device,
    with_leaves,
)
from dtf.model.init import cast, init_model
from dtf.model.memory import Footprint, activations
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.update import LocalUpdate, full_params, update_applied
from dtf.sparse.placement import tables_of

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables

SHARE = "share_"
"""Tensors under `share_<index>/` belong to one share of the rows; all others to the run."""


class Replica:
    """One copy of the model and its passes over micro-batches; knows rows and formats, nothing of other ranks.

    `forward`, for the last micro-batch of a step, may sum gradients over ranks in its backward pass; the others
    accumulate on the bare model. `sync`: for a model that talks to other ranks in every pass; called before each with
    whether gradients are to be summed. Then all ranks make the same number of passes.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        device: torch.device,
        forward: Callable[..., Any] | None = None,
        sync: Callable[[bool], None] | None = None,
    ) -> None:
        self.model, self._forward, self._sync, self._device = model, forward or model, sync, device
        self._passes = ForwardPass(task, device)
        self.statistics = BatchNormStatistics(model, task.step.ema)
        self.masks = SeededDropout(model, task.seed, device)
        apply_activation_checkpointing(
            model, modules_to_checkpoint(task.recipe, task.step.remat), task.step.remat, self.masks
        )
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._looked_up = tuple(task.recipe.tables())
        self.row_gradients: dict[str, Tensor] = {}  # of what was looked up for the last step, by name of the input
        self._trials: list[tuple[int, Footprint]] = []  # of the rehearsal's passes, with their rows
        self.undivided: dict[str, Tensor] = {}  # norms of its gradients of parameters that this rank holds in whole
        model.train()

    def accumulate(
        self,
        ticket: Train,
        batch: Batch,
        bounds: list[int],
        own: tuple[int, int],
        shard: Shard,
        factor: Tensor,
    ) -> Tensor:
        """Forward and backward over the micro-batches [own) of a global batch cut at `bounds`; gradients add up in the
        parameters.

        `batch` holds the rows of these micro-batches. The gradient is that of `factor` x (sum of loss over rows), and
        NaN everywhere when the loss is not finite. Returns the metric sums (M,), and leaves gradients of rows of sparse
        tables in `row_gradients`; running averages wait for `statistics.finish`.
        """
        first, last = own
        if not self.model.training:
            self.model.train()
        self.statistics.begin(last - first, len(bounds) - 1, shard.count)
        if first == last:  # padding rows: collectives in the backward pass need a pass, the gradient is zero
            parts = [with_leaves(batch, self._looked_up)]
            sums = [self._pass(parts[0], factor, True)]
        else:
            at = [bound - bounds[first] for bound in bounds[first : last + 1]]
            parts = [rows_of(batch, *ends) for ends in pairwise(at)] if last - first > 1 else [batch]
            parts = [with_leaves(part, self._looked_up) for part in parts]
            # another rank has one more
            if self._sync is not None and last - first < -(-(len(bounds) - 1) // shard.count):
                self.statistics.begin_padding()
                self._pass(parts[0]._replace(weight=torch.zeros_like(parts[0].weight)), factor, False)
            sums = []
            for j, part in enumerate(parts):
                self.masks.begin_micro_batch(ticket.step, first + j)
                self.statistics.begin_micro_batch(j)
                sums.append(self._pass(part, factor, j == len(parts) - 1))
        self.statistics.end()
        self.row_gradients = leaf_gradients(parts, self._looked_up)
        return sum(sums[1:], start=sums[0])

    def sit_out(self, micro_batches: int, shares: int) -> None:
        """A step in which this replica has no micro-batch and nobody waits for it; running averages decay all the
        same.
        """
        self.model.train()
        self.statistics.begin(0, micro_batches, shares)
        self.statistics.end()

    def _pass(self, batch: Batch, factor: Tensor, last: bool) -> Tensor:
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
                wanted = [*self._trained, *(batch.inputs[name] for name in self._looked_up)]
                gradients = torch.autograd.grad(total, wanted, seed, allow_unused=True)
                for parameter, gradient in zip(wanted, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self._passes.measure(outputs, batch, loss)

    def warmup(self, batch: Batch, spread: bool) -> bool:
        """Two passes, over two rows and over all, whose results are forgotten; returns whether the model drew from the
        global generator.

        DDP lays out its buckets anew at the start of its second pass, and the order of a sum over more than two ranks
        depends on an element's place in a bucket: without this, the step after a resume would differ from the same step
        of an unbroken run in the last bits. ConfigError for what cannot run: a lone row under batch normalisation, and
        if `spread`, buffers that the forward pass changes.
        """
        state, self._trials = None, []
        try:
            with buffers_kept(self, spread, "launcher.processes=1"):
                for part in (with_leaves(rows, self._looked_up) for rows in (rows_of(batch, 0, 2), batch)):
                    self.masks.begin_micro_batch(0, 0)
                    state = self.masks.rng_state()
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
        return state is not None and not torch.equal(state, self.masks.rng_state())

    def memory(self, update: Update, micro_batches: int, rows: int) -> Memory:
        """With so many micro-batches a step of so many rows each; after `warmup`."""
        parameters, gradients, optimizer, tables = update.bytes()
        # else whoever wraps the model knows where gradients wait
        if self._forward is self.model and self._sync is None:
            gradients += pending_grad_bytes(
                [byte_count([parameter]) for parameter in map(local, self._trained)], micro_batches
            )
        buffers = byte_count(local(buffer) for buffer in self.model.buffers())
        return Memory(parameters + buffers, gradients, optimizer, activations(self._trials, rows), tables=tables)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluated:
        """A batch with running statistics and without dropout."""
        if self.model.training:
            self.model.eval()
        outputs, loss = self._passes.losses(self._passes.forward(self.model, batch.inputs), batch)
        return self._passes.evaluated(outputs, batch, loss)


class Spmd(Program):
    """A replica on every rank and an update that makes them agree; the wrapped forward does the talking, if any.

    `dims`: where several ranks are one replica; then gradients come summed over replicas, else averaged over ranks, as
    torch does. `exchange`: bytes of what is on its way between ranks, see Memory. `tables`: those of the update.
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
        self._settled, self._exchange = True, exchange
        self._unsaid = torch.zeros(2, device=world.device)
        self._factor = torch.full((), 1.0 if dims else world.size, device=world.device, dtype=loss_dtype(task))

    def prepare(self, batch: Batch | None) -> Batch | None:
        if batch is not None:
            batch = to_device(batch, self._world.device, self._task)
        if self._dims:
            batch = self._dims.broadcast(batch)
        return None if batch is None else apply_receive(batch, self._task)

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(batch, train=False)
        if self._dims is None:
            self._replica.warmup(rows_of(batch, 0, 4), spread=self.shares > 1)
            return
        with name_failing_module(self._replica.model), self._replica.masks.record_input_norms() as seen:
            drew = self._replica.warmup(rows_of(batch, 0, 4), spread=self.shares > 1)
        if drew:
            raise refuse_global_rng("tensor", "and ranks that divide its channels would draw alike for different ones")
        self._dims.check_alike(seen | {f"gradients of {name}": norm for name, norm in self._replica.undivided.items()})

    def memory(self) -> Memory:
        return self._replica.memory(self._update, *microbatch_load(self._task, self.shares))._replace(
            exchange=self._exchange
        )

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = cut(ticket.rows, self.micro_batch_rows)
        own = share(len(bounds) - 1, self._share)
        self._update.begin()
        if self._tables is not None:
            batch = self._tables.lookup(batch, train=True)
        factor = self._update.scale(self._factor / ticket.rows)
        sums = self._replica.accumulate(ticket, batch, bounds, own, self._share, factor)
        if self._tables is not None:
            self._tables.backward(self._replica.row_gradients)
        self._settled = False
        with section("optimizer"):
            norm = self._update.apply(ticket.step, ticket.lr)
        self._replica.statistics.finish(update_applied(norm))
        # every rank knows the norm, one tells it
        return StepOutput(self._said(sums), norm if self._world.rank == 0 else self._unsaid)

    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        if self._tables is not None:
            batch = self._tables.lookup(batch, train=False)
        sums, rows = self._replica.evaluate(batch)
        return Evaluated(self._said(sums), rows if self._reads else None)

    def _said(self, sums: Tensor) -> Tensor:
        """Sums of rows that several ranks have are told by one of them."""
        return sums if self._reads else torch.zeros_like(sums)

    def swap_ema(self, on: bool) -> None:
        self._update.swap_ema(on)
        self._replica.statistics.swap_ema(on)

    def sync(self) -> None:
        if not self._settled:
            self._replica.statistics.average(self._average)
            self._settled = True

    def state(self) -> State:
        state = self._update.state()
        kept = buffers(self._replica, self._reads) if self._share.index == 0 else []
        return State(state.boxes + kept + own_averages(self._replica, self._share, self._reads), state.scalars)

    def load(self, source: Source) -> None:
        self._update.load(source)
        load_buffers(self._replica, source, self._share)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def skipped(self) -> int:
        return self._update.skipped()


def single_process(task: Task, world: World) -> Program:
    """The program of one rank: with nothing to divide, the bare model is the same under every strategy."""
    model = init_model(task.recipe, task.seed, task.weights)
    masters = cast(model, task.precision, world.device)
    tables = tables_of(task, world, Placement.replicated)
    update = LocalUpdate(
        full_params(model, masters), task.optimizer, task.step.clip_norm, task.precision.loss_scale, tables=tables
    )
    return Spmd(Replica(model, task, world.device), update, task, world, tables=tables)


class Part(Protocol):
    """A model or a part of one, with what it averages."""

    model: nn.Module
    statistics: BatchNormStatistics


@contextmanager
def buffers_kept(part: Part, spread: bool, instead: str) -> Iterator[None]:
    """Passes whose effects on buffers are forgotten.

    ConfigError, if `spread`, for one that they changed and that is no running average.
    """
    tensors = {name: local(buffer) for name, buffer in part.model.named_buffers()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    yield
    averages = set(part.statistics.names())
    for name, tensor in tensors.items():
        if spread and name not in averages and not torch.equal(tensor, before[name]):
            raise ConfigError(
                f"the forward pass changes the buffer {name}, which only one process can keep right; use {instead}"
            )
        tensor.copy_(before[name])


def buffers(part: Part, first: bool = True) -> list[Box]:
    """Boxes of the model's persistent buffers, running averages and their counters included; those held in whole of the
    `first` rank alone.
    """
    kept = part.model.state_dict().keys() - dict(part.model.named_parameters()).keys()
    counters = [(name, torch.tensor(steps)) for name, steps in part.statistics.counters().items()]
    found = [*((name, b) for name, b in part.model.named_buffers() if name in kept), *counters]
    return [_box(stored(name), b, b) for name, b in found if first or is_dtensor(b)]


def stored(name: str) -> str:
    """What a buffer is called in a checkpoint."""
    return f"{EMA_PREFIX}{name.removesuffix(EMA_SUFFIX)}" if name.endswith(EMA_SUFFIX) else f"model/{name}"


def own_averages(part: Part, shard: Shard, first: bool = True) -> list[Box]:
    """Boxes of the running averages of this share of the rows alone.

    With as many shares a run goes on from them, else from their mean.
    """
    if shard.count == 1:  # they are the mean
        return []
    whole = dict(part.model.named_buffers())
    own = part.statistics.stashed().items()
    return [_box(f"{SHARE}{shard.index}/{name}", t, whole[name]) for name, t in own if first or is_dtensor(whole[name])]


@torch.no_grad()
def load_buffers(part: Part, source: Source, shard: Shard) -> None:
    """Inverse of `buffers` and `own_averages`."""
    kept, whole = set(part.model.state_dict()), dict(part.model.named_buffers())

    def take(name: str, tensor: Tensor, into: Tensor) -> None:
        into.copy_(source.read(name, offset(tensor), tuple(into.shape)))

    for name, buffer in whole.items():
        if name in kept:
            take(stored(name), buffer, local(buffer))
    for name in part.statistics.counters():
        part.statistics.restore(int(source.read(f"model/{name}", shape=())))
    if len({name.split("/")[0] for name in source.names() if name.startswith(SHARE)}) == shard.count > 1:
        part.statistics.stash()
        for name, held in part.statistics.stashed().items():
            take(f"{SHARE}{shard.index}/{name}", whole[name], held)


def microbatch_load(task: Task, shares: int, micro_batch_rows: int = 0) -> tuple[int, int]:
    """How many micro-batches the largest share has, and how many rows the largest of them.

    `micro_batch_rows=0`: one for each share, if not set.
    """
    bounds = cut(task.step.batch_size, micro_batch_rows or task.step.rows_each(shares))
    return -(-(len(bounds) - 1) // shares), max(b - a for a, b in pairwise(bounds))


def pending_grad_bytes(sizes: list[int], micro_batches: int) -> int:
    """Bytes of gradients, of these sizes, of a micro-batch that are not yet added to those of the ones before it: see
    `Replica._pass`.
    """
    return 0 if micro_batches == 1 else max(sizes) if micro_batches == 2 else sum(sizes)


def _box(name: str, tensor: Tensor, like: Tensor) -> Box:
    """`tensor` as the part of a global tensor that `like`, perhaps a DTensor, is."""
    return Box(name, local(tensor.detach()), tuple(like.shape), offset(like))
