"""The program of strategies in which every rank runs the whole model on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dtf.api.guard import Guard
from dtf.api.sparse_table import Placement
from dtf.api.task import Source, Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Evaluated, Memory, Shard, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.world import World
from dtf.model.annotate import section
from dtf.model.error_context import name_failing_module
from dtf.model.fingerprint import projections
from dtf.model.forward import (
    copy_of,
    few_rows,
    global_rng_error,
    loss_dtype,
    to_device,
)
from dtf.model.init import cast, whole_model
from dtf.model.loss_terms import per_count, scale_gradients
from dtf.model.memory import row_flops
from dtf.model.module_outputs import ModuleOutputs
from dtf.model.seeded_dropout import find_drawing_modules
from dtf.optim.sharding import Sharding, full_params
from dtf.optim.update import LocalUpdate
from dtf.sparse.make_tables import tables_of
from dtf.strategies.buffers import buffers, load_buffers, own_averages
from dtf.strategies.guard.spmd_guard import spmd_guard
from dtf.strategies.pass_probes import refuse_drawing
from dtf.strategies.reading_ahead import ReadsAhead
from dtf.strategies.replica import Replica
from dtf.strategies.replica_digests import compare_replicas, exchange_of, part_of, shared_parts, whole_and_slices
from dtf.strategies.sharding_check import check_sharding
from dtf.strategies.start_check import ALIKE, Collectives, alike_within, check_evaluation, differing_module
from dtf.strategies.start_padding import pads
from dtf.strategies.step_traffic import mesh_rows, step_passes, step_traffic
from dtf.strategies.trial_numbers import trial
from dtf.strategies.unsaved import Unsaved

_ALIKE = "and ranks that divide its channels would draw alike for different ones"


class Spmd(ReadsAhead):
    """A replica on every rank, and an update that makes them agree, as `sharding` says.

    `dims`: given where ranks form a device mesh. Then gradients arrive summed over those that compute other rows,
    otherwise averaged over ranks, as torch's wrappers do. `exchange`: bytes in flight between ranks, see Memory.
    `zero`: the stage of ZeRO of what is in slices.
    `to_sum`: makes the wrapper sum gradients in place of averaging them.

    To make one is collective. ConfigError on all ranks when `sharding` is not that of the replica's model.
    """

    follows_memory_format = True

    def __init__(
        self,
        replica: Replica,
        sharding: Sharding,
        task: Task,
        world: World,
        dims: ParallelDims | None = None,
        exchange: int = 0,
        to_sum: Callable[[], None] | None = None,
        zero: int = 3,
    ) -> None:
        for given, kind in ((replica, Replica), (task, Task), (world, World)):
            if not isinstance(given, kind):
                raise ConfigError(
                    f"Spmd got a {type(given).__name__} where it takes a {kind.__name__}; write "
                    "Spmd(Replica(model, task, world.device), sharding, task, world)"
                )
        check_sharding(sharding, replica.model, world)
        if sharding.tables is None and task.recipe.table_widths():
            raise ConfigError(
                f"{type(task.recipe).__name__} has sparse tables, and this strategy keeps none: its Sharding has no "
                "tables; use strategy=ddp, or make them with tables_of(task, world, placement, share=1 / world.size)"
            )
        self._update = LocalUpdate(sharding, task.optimizer, task.step.clip_norm, task.precision.loss_scale)
        self._sharding, self._to_sum = sharding, to_sum
        self._tables = self.tables = sharding.tables
        self._share = dims.dp_shard if dims else Shard(world.rank, world.size)
        self._reads = dims is None or dims.reads
        self.shard = self._share if self._reads else None
        self.shares = self._share.count
        self.micro_batch_rows = task.step.rows_each(self.shares)
        self._replica, self._task, self._world, self._dims = replica, task, world, dims
        self._average = dims.average if dims else world.average
        self._synced, self._exchange, self._zero = True, exchange, zero
        self._about: dict[str, str] = {}
        self._few: Batch | None = None  # for passes of all replicas over the same rows
        self._unsaved: Unsaved | None = None
        self._compared: list[str] | None = None  # names of parts that several replicas hold
        replica.divided = self.shares > 1
        self._together = dims is not None and dims.sizes.layer_ranks > 1  # whether ranks compute a layer together
        bounds = micro_batch_bounds(task.step.batch_size, self.micro_batch_rows)
        replica.pads = pads(len(bounds) - 1, self.shares, replica.equal_passes)
        self._factor = torch.full((), 1.0 if dims else world.size, device=world.device, dtype=loss_dtype(task))
        self._factors: dict[int, Tensor] = {}  # rows of a global batch -> what its loss is multiplied by

    @property
    def update(self) -> LocalUpdate:
        """The update of what is here of the parameters. A subclass that changes the tensors of its `kept` calls its
        `refresh` then.
        """
        return self._update

    def prepare(self, batch: Batch | None) -> Batch | None:
        if batch is not None:
            batch = to_device(batch, self._world.device, self._task)
        return self._dims.broadcast(batch) if self._dims and self._dims.broadcast else batch

    def about(self) -> dict[str, str]:
        return self._about

    def tell(self, about: dict[str, str]) -> None:
        """Add lines to the start-up table, see `about`."""
        self._about |= about

    def warmup(self, batch: Batch | None) -> None:
        assert batch is not None
        self._try(batch)
        if self._dims is not None:
            passes = step_passes(self._task, self._dims, self.micro_batch_rows)
            sent = step_traffic(self._replica.trials, self._dims, passes, self._zero)
            self._about = mesh_rows(sent, self._dims, self._world) | self._about

    def _try(self, batch: Batch) -> None:
        if self._tables is not None:
            batch = self._tables.lookup(self._replica.receiver.train(batch, 0, 0), train=False)
        self._few = few_rows(batch)
        peers = self._world
        if self.shares == 1:
            models, scratch = [self._replica.model], self._replica.scratch
            run = self._replica.passes(self._few).run
            self._unsaved = Unsaved(models, self._task.recipe, scratch, run, self._task.precision.compute, peers)
        if self._dims is None or not self._together:
            self._replica.warmup(batch, peers)
            self.row_flops = row_flops(self._replica.trials)
            if self._replica.clipped and self._dims is None:
                self._sum_gradients()
            return
        model, masks = self._replica.model, self._replica.masks
        drawing_modules = find_drawing_modules(model.named_modules())
        within = alike_within(self._task.precision.compute)
        with name_failing_module(model), masks.record_inputs(within) as seen, drawing_modules as drawing:
            drew = self._replica.warmup(batch, peers)
        if drew:
            raise global_rng_error(_ALIKE, drawing[0] if drawing else "")
        self.row_flops = row_flops(self._replica.trials, self._dims.total, self._dims.total_of_segments)
        positions = self._replica.positions
        partial = () if positions is None else positions.partial_of(model)
        gradients = {
            f"gradients of {name}": found for name, found in self._replica.undivided.items() if name not in partial
        }
        numbers = self._replica.start_numbers.items()
        sums = {name: projections(torch.tensor(n), ALIKE) for name, n in numbers if name.startswith("sum ")}
        if unlike := self._dims.unlike(seen.everywhere | gradients | sums, seen.by_layer):
            raise self._dims.unlike_error(unlike[0])

    def _sum_gradients(self) -> None:
        """From now on sum gradients over ranks in place of averaging them: those that flow through the model are then
        what they are in one process.
        """
        if self._to_sum is None:
            raise ConfigError(
                f"the {self._replica.clipped} does not grow with the loss: a hook or a function of the model clips or "
                "rounds gradients, which are multiplied by the number of ranks here; use strategy=ddp"
            )
        self._to_sum()
        self._factor = self._factor / self._world.size
        self._factors.clear()

    def memory(self) -> Memory:
        return self._replica.memory(self._update, *microbatch_load(self._task, self.shares), self._exchange)

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        bounds = micro_batch_bounds(ticket.rows, self.micro_batch_rows)
        micro_batches = micro_batches_of(len(bounds) - 1, self._share)
        if self._tables is not None:
            batch = self._tables.lookup(self._received(ticket, batch, bounds, micro_batches), train=True)
        factor = self._factors.get(ticket.rows)
        if factor is None:
            factor = self._factors[ticket.rows] = self._factor / ticket.rows
        factor = self._update.scale(factor)
        self._update.drop_gathered()
        sums = self._replica.accumulate(ticket, batch, bounds, micro_batches, self._share, factor)
        if self._replica.counts is not None:
            counts = self._replica.counts.double().reshape(1)
            self._average(counts)
            ratio = per_count(ticket.rows, counts[0] * self.shares)
            scale_gradients(self._replica.model.parameters(), self._replica.row_gradients.values(), ratio)
        if self._tables is not None:
            self._tables.backward(self._replica.row_gradients)
        self._synced = False
        with section("optimizer"):
            norm = self._update.apply(ticket.step, ticket.lr)
        applied = self._update.applied
        changed = self._replica.changing.total()
        if changed is not None:
            self._average(changed)
            changed *= self.shares
        self._replica.changing.finish(changed, len(bounds) - 1, applied)
        self._replica.statistics.finish(applied)
        # every rank knows the norm, one reports it
        return StepOutput(self._counted_once(sums), norm if self._world.rank == 0 else (0.0, 0.0))

    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        sums, rows = self._evaluated(batch)
        return Evaluated(self._counted_once(sums), rows if self._reads else None)

    def _evaluated(self, batch: Batch) -> Evaluated:
        """With the sums on all ranks that evaluate these rows."""
        if self._tables is not None:
            batch = self._tables.lookup(self._replica.receiver.evaluate(batch), train=False)
        return self._replica.evaluate(batch)

    def trial_eval(self, batch: Batch | None) -> Evaluated | None:
        assert batch is not None
        if self._unsaved:
            self._unsaved.evaluate = lambda: self.trial_eval(batch)
        models = [self._replica.model]
        alike = refuse_drawing(models, _ALIKE, self._world) if self._together else nullcontext()
        with trial(models, self._task), alike:
            evaluated = self.eval_step(copy_of(batch))
            if self._replica.divided:
                peers = self._world
                check_evaluation(self._evaluated, batch, models, self._task, peers, self._replica.instead)
            return evaluated

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

    def check_replicas(self) -> str | None:
        if self._few is None:
            return None
        if self.shares == 1:
            return self._unsaved and self._unsaved.warning()
        place = f"part {self._dims.layer_rank}" if self._dims else "model"
        parts = [*whole_and_slices(self._update.held()), part_of(self._replica, place, {}, self._task.recipe)]
        compute, peers = self._task.precision.compute, self._world
        if self._compared is None:
            self._compared = shared_parts([parts], peers)
        passes, firsts = [self._replica.passes(self._few)], Collectives(self._gather_firsts, self._world.broadcast)
        suspect = exchange_of(self.plugin, self._sharding) if self.plugin else ""
        instead = self._replica.instead
        compare_replicas(
            [parts], self._compared, peers, lambda: differing_module(passes, compute, firsts), instead, suspect
        )
        return None

    def counts(self) -> dict[str, int]:
        return self._tables.life_counts() if self._tables is not None else {}

    def guard(self) -> Guard | None:
        if self.shares == 1 or self._tables is not None or self._sharding.owned is not None:
            return None
        return spmd_guard(self._replica, self._update, self._dims, self, self._task, self._world, self._factor)

    def _gather_firsts(self, value: Any) -> list[Any] | None:
        """As `World.gather`, the value of one rank of each replica: others may have slices of the outputs."""
        everyone = self._world.gather(value)
        if everyone is None or self._dims is None:
            return everyone
        return [everyone[ranks[0]] for ranks in self._dims.mesh_rows]

    def state(self) -> State:
        state = self._update.state()
        common = buffers(self._replica, self._reads) if self._share.index == 0 else []
        return state._replace(
            boxes=state.boxes + common + own_averages(self._replica, self._share, self._reads), private=True
        )

    def load(self, source: Source) -> None:
        self._update.load(source)
        load_buffers(self._replica, source, self._share)

    def replicated(self) -> list[dict[str, Tensor]]:
        return [self._update.held()]

    def watch_outputs(self) -> list[ModuleOutputs]:
        return [self._replica.watch_outputs()]

    def skipped(self) -> int:
        return self._update.skipped()

    def first_skipped(self) -> tuple[int, list[str]] | None:
        return self._update.first_skipped()


def single_process(task: Task, world: World) -> Spmd:
    """The program of a run with one rank: the bare model, the same under every strategy."""
    model = whole_model(task)
    masters = cast(model, task.precision, world.device)
    tables = tables_of(task, world, Placement.replicated)
    sharding = Sharding(params=full_params(model, masters), tables=tables)
    return Spmd(Replica(model, task, world.device), sharding, task, world)


def microbatch_load(task: Task, shares: int, micro_batch_rows: int = 0) -> tuple[int, int]:
    """(micro-batches of the largest share, rows of the largest micro-batch).

    `micro_batch_rows=0`: as `step.micro_batch_rows` says, or one micro-batch for each share.
    """
    bounds = micro_batch_bounds(task.step.batch_size, micro_batch_rows or task.step.rows_each(shares))
    return -(-(len(bounds) - 1) // shares), max(b - a for a, b in pairwise(bounds))
