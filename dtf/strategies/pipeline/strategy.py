"""Pipeline parallelism: the model cut into stages, one or more on every rank of a group; data parallelism over the rest
of the ranks.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.options import Compile
from dtf.api.registry import option, register
from dtf.api.sparse_table import Placement, Placements
from dtf.api.strategy import Program, Strategy, check_divides, check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.strategies.pipeline.schedules import Schedule, bubble, in_flight

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.fx import GraphModule

    from dtf.distributed.device_mesh import ParallelDims
    from dtf.distributed.world import World
    from dtf.optim.sharding import ParamShard
    from dtf.optim.update import LocalUpdate
    from dtf.sparse.sharded_tables import ShardedTables
    from dtf.strategies.pipeline.planner import PipelineSpec
    from dtf.strategies.pipeline.shared_tensors import TiedGradients

PER_RANK = 4
"""Micro-batches of a global batch for each rank of a pipeline, unless step.micro_batch_rows says otherwise: the bubble
is below a fifth.
"""


class Balance(Enum):
    time = "time"
    flops = "flops"


@register("strategy", "pipeline")
class Pipeline(Strategy):
    """Ranks in groups of `degree` hold the model in stages, micro-batches flow through them; groups divide the rows.

    Bytes per micro-batch: what is live at each cut, forward, and its gradient, backward; groups all-reduce the
    gradients of what a rank holds once a step. A rank is idle for (p - 1) / (v m + p - 1) of a step, with p ranks, v
    stages on each and m micro-batches of equal length; for longer where v > 1 and p does not divide m. Sources: Huang
    et al. 2019 (arXiv:1811.06965); Narayanan et al. 2019, 2021 (arXiv:1806.03377, arXiv:2104.04473).
    """

    uses_blocks = True

    tables: Placements = option(
        default=Placement.row_wise,
        doc="how sparse tables are sharded: `rows` (or `row_wise`): by a hash of the id; `columns` (`column_wise`): "
        "each rank some columns of all rows; `tables` (`table_wise`): each rank whole tables; `replicated`: not at "
        "all; `auto`: for each table what sends least; or a mapping of tables to these",
    )
    degree: int = option(
        default=0,
        least=0,
        doc="ranks in a pipeline; it divides launcher.processes, the quotient divides the rows; 0: all ranks",
    )
    schedule: Schedule = option(  # type: ignore[valid-type]
        default=Schedule["1f1b"],
        doc="`gpipe`: all forward passes of a step, then all backward passes; `1f1b`: a backward pass as soon as there "
        "is one to do, which holds the activations of fewer micro-batches; the numbers are the same",
    )
    virtual: int = option(
        default=1,
        least=1,
        most=64,
        doc="stages on each rank (interleaving): more make the bubble smaller and send more",
        unit="stages",
    )
    balance: Balance = option(
        default=Balance.time,
        doc="what stages should have in equal parts: `time` measures each block's forward and backward pass at the "
        "start, `flops` counts and runs nothing",
    )
    cuts: list[str] = option(
        factory=list,
        doc="blocks with which a stage begins, by the names in the recipe's layout; empty: cut by `balance`",
    )
    memory_gb: float = option(
        default=0.0,
        least=0,
        most=1_000_000,
        doc="most memory of a rank for parameters, optimizer and activations; 0: no bound",
        unit="GiB",
    )

    def check(self, task: Task, processes: int, devices: str) -> None:
        check_tables(task, self.tables, processes)
        check_divides("strategy.degree", self.degree, processes)
        ranks = self.degree or processes
        if ranks == 1 and self.virtual > 1:
            raise ConfigError(
                f"strategy.virtual={self.virtual} needs at least 2 ranks in a pipeline; use strategy.virtual=1, or "
                "more processes"
            )
        if ranks == 1 and self.memory_gb:
            raise ConfigError(
                f"strategy.memory_gb={self.memory_gb:g} bounds the cut of a model, which one process does not cut; "
                "use 0, or more processes"
            )
        stages = ranks * self.virtual
        if self.cuts and len(self.cuts) != stages - 1:
            raise ConfigError(
                f"strategy.cuts={self.cuts} makes {len(self.cuts) + 1} stages, this run has {stages}; name "
                f"{stages - 1}, or none"
            )
        repeated = [name for i, name in enumerate(self.cuts) if name in self.cuts[:i]]
        if repeated:
            raise ConfigError(
                f"strategy.cuts={self.cuts} names {repeated[0]} twice; each stage begins with another block"
            )

    def unguarded(self, processes: int) -> str:
        if processes == (self.degree or processes):
            return "all ranks form one replica; use a strategy.degree below launcher.processes"
        return ""

    def uncompiled(self, kind: Compile, processes: int) -> str:
        if kind is Compile.blocks or processes == 1:
            return ""
        return "stages divide the model; use step.compile=blocks, or step.compile=off"

    def communication(self, devices: str) -> str | None:
        return "nccl" if devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        from dtf.model.activation_checkpointing import modules_to_checkpoint
        from dtf.model.draw_by_name import draws_by_name
        from dtf.model.init import formats, layout_of, model_to_cut
        from dtf.strategies.spmd import single_process

        if world.size == 1:
            return single_process(task, world)

        from dtf.distributed.device_mesh import ParallelDims
        from dtf.sparse.make_tables import tables_of
        from dtf.strategies.pipeline.messages import PipelineRanks, channels
        from dtf.strategies.pipeline.planner import broadcast_plan
        from dtf.strategies.pipeline.program import PipelineProgram
        from dtf.strategies.pipeline.shared_tensors import SharedTensors, TiedGradients, holders
        from dtf.strategies.pipeline.stage import Stage
        from dtf.strategies.sharded_init import cast_parts

        dims = ParallelDims(world, "pp", self.degree or world.size, inputs=False)
        rows, spec = self._spec(task, world, dims.dp_shard.count)
        stages = spec.ranks * spec.virtual
        model = model_to_cut(task)
        _refuse_what_no_stage_does(model, dims.dp_shard.count > 1)
        layout = layout_of(task.recipe, model)
        checkpointed = modules_to_checkpoint(task.recipe, model, layout, task.step.remat)
        split, bounds, table = broadcast_plan(model, spec, task, world)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not names:
            raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
        by_name = draws_by_name(task.recipe)
        if by_name:
            cast_parts(model, task.precision, computing=True)
        segments = {s: split.segment(bounds[s], bounds[s + 1]) for s in range(dims.axis_rank, stages, spec.ranks)}
        copies = holders(split.uses, bounds, spec.ranks)
        shards, stage_names = _settle(model, segments, task, world, by_name)
        elsewhere = frozenset(name for name, places in copies.items() if places[0] != dims.axis_rank)
        shards = {name: shard._replace(is_primary=name not in elsewhere) for name, shard in shards.items()}
        shared = SharedTensors(stage_names, elsewhere, frozenset(copies))
        tables = tables_of(task, world, self.tables, gives=dims.broadcast.reads)
        dtype = next(iter(formats(model, task.precision).values()))[1]
        trained = [name for name, shard in shards.items() if shard.parameter.requires_grad]
        tied = TiedGradients(
            {name: copies[name] for name in names if name in copies}, dims.mesh_rows, world.rank, trained
        )
        update = _update(task, world, dims, shards, names, dtype, tables, tied)
        links = channels(dims.mesh_rows, stages, world.rank, world.device)
        pipeline = PipelineRanks(dims.mesh_rows[dims.dp_shard.index], dims.axis_rank, stages, *links)
        parts, wrapped = [], set()
        for s, segment in segments.items():
            again = [name for name in checkpointed if name not in wrapped]
            wrapped |= {name for name, _ in segment.named_modules()}
            parts.append(Stage(s, segment, task, world.device, again, layout.buffers))
        return PipelineProgram(parts, pipeline, self.schedule, update, task, world, dims, rows, table, tables, shared)

    def _spec(self, task: Task, world: World, shares: int) -> tuple[int, PipelineSpec]:
        """The rows of a micro-batch, and what the stages have to be. `shares`: pipelines that divide the rows."""
        from dtf.data.batches import micro_batch_bounds
        from dtf.strategies.pipeline.planner import PipelineSpec

        ranks = self.degree or world.size
        virtual = self.virtual if ranks > 1 else 1
        # batch statistics need two rows
        count = max(shares, min(PER_RANK * world.size, task.step.batch_size // 2))
        rows = task.step.rows_each(count)
        bounds = micro_batch_bounds(task.step.batch_size, rows)
        micro_batches = -(-(len(bounds) - 1) // shares)  # of one pipeline, at most
        spec = PipelineSpec(
            ranks,
            virtual,
            micro_batches,
            bubble(self.schedule, ranks, virtual, micro_batches),
            bounds[1],
            [in_flight(self.schedule, s, ranks, virtual, micro_batches) for s in range(ranks * virtual)],
            self.cuts,
            self.balance is Balance.time,
            math.ceil(self.memory_gb * 2**30),
        )
        return rows, spec


def _settle(
    model: nn.Module, segments: dict[int, GraphModule], task: Task, world: World, by_name: bool
) -> tuple[dict[str, ParamShard], dict[int, dict[str, str]]]:
    """Give this rank's segments their place, format and numbers, in place. Returns what the update gets, by first
    names, and the first names of each stage's tensors.
    """
    from dtf.strategies.pipeline.shared_tensors import RankTensors, Ties, check_formats, first_names, renamed
    from dtf.strategies.sharded_init import draw, lay_out, param_shards, settle

    first = first_names(model)
    names = {s: renamed(segment, first) for s, segment in segments.items()}
    ties = Ties(segments.values())
    masters: dict[str, torch.Tensor] = {}
    for s, segment in segments.items():
        if not by_name:
            check_formats(model, segment, names[s], task.precision)
        made = (lay_out if by_name else settle)(segment, task.precision, world.device)
        masters = {names[s][name]: master for name, master in made.items()} | masters
    ties.join()
    tensors = RankTensors((segment, names[s]) for s, segment in segments.items())
    if by_name:
        draw(tensors, task, masters)
    return param_shards(tensors, masters), names


def _update(
    task: Task,
    world: World,
    dims: ParallelDims,
    shards: dict[str, ParamShard],
    names: list[str],
    dtype: torch.dtype,
    tables: ShardedTables | None,
    tied: TiedGradients,
) -> LocalUpdate:
    """The update of this rank's stages, `shards`. `names`: all trained parameters of the model, in its order."""
    import torch

    from dtf.optim.sharding import Sharding
    from dtf.optim.update import LocalUpdate

    trained = [(name, shard.is_primary) for name, shard in shards.items() if shard.parameter.requires_grad]
    counted = [i for i, (_, primary) in enumerate(trained) if primary]
    own, positions = (
        torch.tensor(indices, dtype=torch.int64, device=world.device)
        for indices in (counted, [names.index(trained[i][0]) for i in counted])
    )

    def all_norms(norms: torch.Tensor) -> torch.Tensor:
        """Norms of all parameters in the model's order, whichever stage has them: the same bits for every cut."""
        everyone = norms.new_zeros(len(names))
        everyone[positions] = norms[own]
        return dims.total(everyone)

    def complete_gradients(gradients: list[torch.Tensor]) -> None:
        if dims.reduce is not None:
            dims.reduce(gradients)
        tied(gradients)

    sharding = Sharding(
        params=shards,
        writes=dims.dp_shard.index == 0,
        complete_gradients=complete_gradients,
        all_norms=all_norms,
        tables=tables,
        like=torch.empty(0, dtype=dtype, device=world.device),
    )
    return LocalUpdate(sharding, task.optimizer, task.step.clip_norm, task.precision.loss_scale)


def _refuse_what_no_stage_does(model: nn.Module, divided: bool) -> None:
    """Raise ConfigError for what a model does in one piece only. `divided`: whether several pipelines have rows."""
    from dtf.model.outside_tensors import refuse_held
    from dtf.strategies.own_memory import refuse_shared_memory
    from dtf.strategies.pass_probes import refuse_hooks_on_sums
    from dtf.strategies.pipeline.graph_split import refuse_hooks_of_root
    from dtf.strategies.pipeline.trials import INSTEAD

    if divided:
        refuse_hooks_on_sums(model, INSTEAD)
    refuse_hooks_of_root(model)
    refuse_shared_memory(model, "strategy=pipeline", "strategy=ddp")
    refuse_held(model, "strategy=pipeline")
