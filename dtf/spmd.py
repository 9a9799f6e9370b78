"""The program of strategies in which every rank runs the whole model on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dtf.build import DTYPES
from dtf.errors import ConfigError
from dtf.microbatch import Masks, RunningStatistics
from dtf.precision import Cast
from dtf.sampler import cut, share
from dtf.strategy import Program, Source, Task, Update
from dtf.values import Batch, Box, Shard, State, StepOutput, Train
from dtf.world import World

SHARE = "share_"
"""Tensors under `share_<index>/` belong to one share of the rows; all others to the run."""

HALF = (torch.bfloat16, torch.float16)


class Replica:
    """One copy of the model and its passes over micro-batches; knows rows and formats, nothing of other ranks.

    `forward`, for the last micro-batch of a step, may sum gradients over ranks in its backward pass; the others accumulate on the bare model.
    `sync`: for a model that talks to other ranks in every pass; called before each with whether gradients are to be summed. Then all ranks make
    the same number of passes.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        device: torch.device,
        forward: Callable[..., Any] | None = None,
        sync: Callable[[bool], None] | None = None,
    ) -> None:
        self.model, self._forward, self._sync, self._recipe, self._device = model, forward or model, sync, task.recipe, device
        compute = DTYPES[task.precision.compute]
        self._autocast = compute if task.precision.cast is Cast.autocast else None
        self._input = None if self._autocast else compute
        self.statistics = RunningStatistics(model)
        self.masks = Masks(model, task.seed, device)
        self._trained = [p for p in model.parameters() if p.requires_grad]
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
        """Forward and backward over the micro-batches [own) of a global batch cut at `bounds`; gradients add up in the parameters.

        `batch` holds the rows of these micro-batches. The gradient is that of `factor` x (sum of loss over rows), and NaN
        everywhere when the loss is not finite. Returns the metric sums (M,).
        """
        first, last = own
        if not self.model.training:
            self.model.train()
        self.statistics.begin(last - first, len(bounds) - 1, shard.count)
        if first == last:  # padding rows: collectives in the backward pass need a pass, the gradient is zero
            sums = [self._pass(batch, factor, True)]
        else:
            at = [bound - bounds[first] for bound in bounds[first : last + 1]]
            parts = [rows_of(batch, *ends) for ends in pairwise(at)] if last - first > 1 else [batch]
            if self._sync is not None and last - first < -(-(len(bounds) - 1) // shard.count):  # another rank has one more
                self.statistics.pad()
                self._pass(parts[0]._replace(weight=torch.zeros_like(parts[0].weight)), factor, False)
            sums = []
            for j, part in enumerate(parts):
                self.masks.enter(ticket.step, first + j)
                self.statistics.enter(j)
                sums.append(self._pass(part, factor, j == len(parts) - 1))
        self.statistics.end()
        return sum(sums[1:], start=sums[0])

    def sit_out(self, micro_batches: int, shares: int) -> None:
        """A step in which this replica has no micro-batch and nobody waits for it; running averages decay all the same."""
        self.model.train()
        self.statistics.begin(0, micro_batches, shares)
        self.statistics.end()

    def _pass(self, batch: Batch, factor: Tensor, last: bool) -> Tensor:
        if self._sync is not None:
            self._sync(last)
        outputs, loss = self._outputs(batch, self._forward if last else self.model)
        total = (loss * batch.weight).sum()
        # 0 x a non-finite loss is NaN: it reaches every gradient here and, summed, every rank, before anything is updated.
        seed = total.detach() * 0 + factor
        if last or self._sync is not None:
            total.backward(seed)
        else:
            # Not backward(): hooks that sum gradients over ranks must see each parameter once a step (DDP with a static graph counts).
            gradients = torch.autograd.grad(total, self._trained, seed, allow_unused=True)
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        with torch.no_grad():
            return self._recipe.measure(_detach(outputs), batch, loss.detach())

    def rehearse(self, batch: Batch, spread: bool) -> bool:
        """Two passes whose results are forgotten; returns whether the model drew from the global generator.

        DDP lays out its buckets anew at the start of its second pass, and the order of a sum over more than two ranks depends on an element's place
        in a bucket: without this, the step after a resume would differ from the same step of an unbroken run in the last bits.
        ConfigError for what cannot run: a lone row under batch normalisation, and if `spread`, buffers that the forward pass changes.
        """
        buffers = dict(self.model.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        averages = {id(t) for t in self.statistics.tensors()}
        state = None
        try:
            for _ in range(2):
                self.masks.enter(0, 0)
                state = torch.random.get_rng_state()
                self._pass(batch, torch.zeros((), device=self._device), last=True)
                for parameter in self._trained:
                    parameter.grad = None
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ConfigError(
                f"a micro-batch of {len(batch.ids)} row is too small for batch normalisation over a single value; "
                "use sampler.tail=fill or drop, or another step.batch_size or step.micro_batch_rows"
            ) from error
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            raise ConfigError("some parameters got no gradient in a step; set strategy.find_unused_parameters=true") from error
        drew = state is not None and not torch.equal(state, torch.random.get_rng_state())
        for name, buffer in buffers.items():
            if spread and id(buffer) not in averages and not torch.equal(buffer, before[name]):
                raise ConfigError(f"the forward pass changes the buffer {name}, which only one process can keep right; use launcher.processes=1")
            buffer.copy_(before[name])
        return drew

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Metric sums (M,) of a batch, with running statistics and without dropout."""
        if self.model.training:
            self.model.eval()
        outputs, loss = self._outputs(batch, self.model)
        return self._recipe.measure(outputs, batch, loss)

    def _outputs(self, batch: Batch, forward: Callable[..., Any]) -> tuple[Any, Tensor]:
        if self._autocast is None:
            outputs = forward(_cast(batch.inputs, self._input))
        else:
            with torch.autocast(self._device.type, dtype=self._autocast):
                outputs = forward(batch.inputs)
        outputs = _cast(outputs, torch.float32, HALF)  # a loss in half precision loses the small differences it is made of
        loss = self._recipe.loss(outputs, batch.targets)
        if loss.shape != batch.weight.shape:
            raise ConfigError(
                f"{type(self._recipe).__name__}.loss returned shape {tuple(loss.shape)}; it must return a loss per row, {tuple(batch.weight.shape)}"
            )
        return outputs, loss


class Spmd(Program):
    """A replica on every rank and an update that makes them agree; the wrapped forward does the talking, if any."""

    def __init__(self, replica: Replica, update: Update, task: Task, world: World) -> None:
        self.shard = self._share = Shard(world.rank, world.size)
        self.shares = world.size
        self._replica, self._update, self._task, self._world = replica, update, task, world
        self._settled = True
        self._unsaid = torch.zeros(2, device=world.device)
        # torch's DDP divides the summed gradient by the number of ranks; the factor takes that back.
        self._factor = torch.full((), float(world.size), device=world.device, dtype=loss_dtype(task))

    def prepare(self, batch: Batch | None) -> Batch | None:
        return batch if batch is None else to_device(batch, self._world.device, loss_dtype(self._task))

    def rehearse(self, batch: Batch | None) -> None:
        assert batch is not None
        self._replica.rehearse(rows_of(batch, 0, 2), spread=self.shares > 1)

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None and self.shard is not None
        bounds = cut(ticket.rows, self._task.step.micro_batch_rows, self.shard.count)
        own = share(len(bounds) - 1, self.shard)
        self._update.begin()
        factor = self._update.scale(self._factor / ticket.rows)
        sums = self._replica.accumulate(ticket, batch, bounds, own, self.shard, factor)
        self._settled = False
        norm = self._update.apply(ticket.step, ticket.lr)
        return StepOutput(sums, norm if self._world.rank == 0 else self._unsaid)  # every rank knows the norm, one tells it

    def eval_step(self, batch: Batch | None) -> Tensor:
        assert batch is not None
        return self._replica.evaluate(batch)

    def settle(self) -> None:
        if not self._settled:
            self._replica.statistics.average(self._world.average)
            self._settled = True

    def state(self) -> State:
        state = self._update.state()
        own = own_averages(self._replica, self._share)
        return State(state.boxes + (buffers(self._replica) if self._world.rank == 0 else []) + own, state.scalars)

    def load(self, source: Source) -> None:
        self._update.load(source)
        load_buffers(self._replica, source, self._share)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def skipped(self) -> int:
        return self._update.skipped()


def buffers(replica: Replica) -> list[Box]:
    """Boxes of the model's persistent buffers, running averages and their counters included."""
    kept = replica.model.state_dict().keys() - dict(replica.model.named_parameters()).keys()
    found = [(name, b) for name, b in replica.model.named_buffers() if name in kept]
    counters = [(name, torch.tensor(steps)) for name, steps in replica.statistics.counters().items()]
    return [Box(f"model/{name}", b.data, tuple(b.shape), (0,) * b.dim()) for name, b in [*found, *counters]]


def own_averages(replica: Replica, shard: Shard) -> list[Box]:
    """Boxes of the running averages of this share of the rows alone. With as many shares a run goes on from them, else from their mean."""
    if shard.count == 1:  # they are the mean
        return []
    return [Box(f"{SHARE}{shard.index}/{name}", t, tuple(t.shape), (0,) * t.dim()) for name, t in replica.statistics.own().items()]


@torch.no_grad()
def load_buffers(replica: Replica, source: Source, shard: Shard) -> None:
    """Inverse of `buffers` and `own_averages`."""
    kept = set(replica.model.state_dict())
    for name, buffer in replica.model.named_buffers():
        if name in kept:
            buffer.copy_(source.read(f"model/{name}", shape=tuple(buffer.shape)))
    for name in replica.statistics.counters():
        replica.statistics.restore(int(source.read(f"model/{name}", shape=())))
    if len({name.split("/")[0] for name in source.names() if name.startswith(SHARE)}) == shard.count > 1:
        replica.statistics.hold()
        for name, held in replica.statistics.own().items():
            held.copy_(source.read(f"{SHARE}{shard.index}/{name}", shape=tuple(held.shape)))


def to_device(batch: Batch, device: torch.device, weight: torch.dtype) -> Batch:
    """The batch on the device; `weight` in the dtype of the loss. Copies from pinned memory do not wait."""
    if device.type == "cpu":
        return batch if batch.weight.dtype is weight else batch._replace(weight=batch.weight.to(weight))
    move = {"device": device, "non_blocking": True}
    inputs = batch.inputs
    inputs = {k: v.to(**move) for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.to(**move)
    return Batch(inputs, batch.targets.to(**move), batch.weight.to(dtype=weight, **move), batch.ids)


def loss_dtype(task: Task) -> torch.dtype:
    """Format in which row losses are weighted and summed."""
    return torch.float64 if DTYPES[task.precision.compute] is torch.float64 else torch.float32


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    """Rows [first, last) of a batch, as views."""
    inputs = batch.inputs
    inputs = {k: v[first:last] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[first:last]
    return Batch(inputs, batch.targets[first:last], batch.weight[first:last], batch.ids[first:last])


def _cast(value: Any, dtype: torch.dtype | None, only: tuple[torch.dtype, ...] | None = None) -> Any:
    """Floating tensors in `value` (a tensor, or a structure of them) as `dtype`; `only`: those that now have one of these."""

    def cast(tensor: Any) -> Any:
        if dtype is None or not isinstance(tensor, Tensor):
            return tensor
        return tensor.to(dtype) if (tensor.dtype in only if only else tensor.dtype.is_floating_point) else tensor

    return cast(value) if isinstance(value, Tensor) else tree_map(cast, value)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
