"""Tensor parallelism: every rank of a group computes slices of the channels of the same rows; data parallelism over the
rest of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.options import Compile
from dtf.api.registry import option, register
from dtf.api.sparse_table import Placement, Placements
from dtf.api.strategy import Program, Strategy, check_divides, check_layout, check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from dtf.distributed.world import World


@register("strategy", "tensor")
class Tensor(Strategy):
    """Ranks in groups of `degree` divide each layer that the recipe's layout splits; groups divide the rows.

    Inside a group, x being an activation's bytes for one micro-batch, each micro-batch costs

        all-reduce of x for each `column` and `classes` layer
            (x: its input; backward, unless the input needs no gradient),
        all-reduce of x for each `row` layer
            (x: its output; forward),
        reduce-scatter and all-gather of x for each `row_scatter` layer
            (x: its whole output; forward and backward),
        three to four numbers a row for the loss and two for the metrics of divided classes;

    `step.remat=blocks` does those of forward in its blocks once more, `selective` keeps what they gave;
    each batch is broadcast once; groups all-reduce the gradients of what a rank holds once a step. A ring moves
    2 (n - 1) / n of an all-reduced tensor and (n - 1) / n of the others through each of n ranks. Source: Shoeybi et al.
    2019 (arXiv:1909.08053).
    """

    tables: Placements = option(
        default=Placement.row_wise,
        doc="how sparse tables are sharded: `rows` (or `row_wise`): by a hash of the id; `columns` (`column_wise`): "
        "each rank some columns of all rows; `tables` (`table_wise`): each rank whole tables; `replicated`: not at "
        "all; `auto`: for each table what sends least; or a mapping of tables to these",
    )
    degree: int = option(
        default=0,
        least=0,
        doc="ranks that divide each layer; it divides launcher.processes, the quotient divides the rows; 0: all ranks",
    )

    def check(self, task: Task, processes: int, devices: str) -> None:
        check_tables(task, self.tables, processes)
        check_divides("strategy.degree", self.degree, processes)
        check_layout("tensor", task.recipe, "how its model is split")

    def unguarded(self, processes: int) -> str:
        if processes == (self.degree or processes):
            return "all ranks form one replica; use a strategy.degree below launcher.processes"
        return ""

    def uncompiled(self, kind: Compile, processes: int) -> str:
        if processes == 1:
            return ""
        return (
            "divided layers talk to other ranks in the middle of what would be one piece; use strategy=fsdp, or "
            "step.compile=off"
        )

    def communication(self, devices: str) -> str | None:
        return "nccl" if devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        from dtf.model.draw_by_name import draws_by_name
        from dtf.model.init import layout_of, model_to_cut
        from dtf.strategies.replica import Replica
        from dtf.strategies.spmd import Spmd, single_process

        model = model_to_cut(task)
        layout = layout_of(task.recipe, model)
        splits = layout.splits
        if not splits and not task.recipe.tables():  # tables are divided anyway
            raise ConfigError(
                f"strategy=tensor: the layout of {type(task.recipe).__name__} splits no module; use strategy=fsdp, "
                "which divides any model"
            )
        if world.size == 1:
            del model  # it is built once more
            return single_process(task, world)

        from dtf.distributed.device_mesh import ParallelDims
        from dtf.model.outside_tensors import refuse_held
        from dtf.optim.sharding import Sharding
        from dtf.sparse.make_tables import tables_of
        from dtf.strategies.own_memory import refuse_shared_memory
        from dtf.strategies.sharded_init import cast_parts, draw, lay_out, param_shards, settle
        from dtf.strategies.tensor_parallel.divide import divide

        refuse_shared_memory(model, "strategy=tensor", "strategy=ddp")
        refuse_held(model, "strategy=tensor")
        dims = ParallelDims(world, "tp", self.degree or world.size)
        if draws_by_name(task.recipe):
            cast_parts(model, task.precision, computing=True)
            divide(model, splits, dims.mesh)
            masters = lay_out(model, task.precision, world.device)
            draw(model, task, masters)
        else:
            divide(model, splits, dims.mesh)
            masters = settle(model, task.precision, world.device)
        tables = tables_of(task, world, self.tables, gives=dims.broadcast.reads)
        sharding = Sharding(
            params=param_shards(model, masters, first=dims.broadcast.reads),
            writes=dims.dp_shard.index == 0,
            complete_gradients=dims.reduce,
            sum_slices=dims.total,
            tables=tables,
        )
        return Spmd(Replica(model, task, world.device, layout=layout), sharding, task, world, dims)
