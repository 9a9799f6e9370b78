"""Any combination of replication, sharding, pipeline and tensor parallelism, as one device mesh."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

from dtf.api.registry import option, register
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.mesh_options import PipelineOptions, ShardOptions, TableOptions
from dtf.strategies.mesh_strategy import MeshStrategy


@register("strategy", "mesh")
class Mesh(PipelineOptions, ShardOptions, TableOptions, MeshStrategy):
    """One device mesh with axes by size: copies of the model, slices of its state, stages, and slices of its layers.

    What each axis sends is told by the strategy that is this axis alone: `fsdp` (shard), `pipeline`, `tensor`.
    `replicate` all-reduces what a rank has of the gradients, once a step.
    """

    uses_blocks = True
    one_share = "strategy.replicate=1 strategy.shard=1, with as many processes as the other axes make"

    replicate: int = option(default=1, least=1, doc="copies of the model, which compute other rows")
    pipeline: int = option(default=1, least=1, doc="ranks that hold a copy of the model in stages", unit="ranks")
    shard: int = option(
        default=0,
        least=0,
        doc="ranks that compute other rows and divide the state of what they have in common, see `zero`; 0: as many as "
        "the other axes leave of launcher.processes",
        unit="ranks",
    )
    context: int = option(
        default=1,
        least=1,
        doc="ranks that divide the positions of each row, and the heads of attention, see `positions` of the layout",
        unit="ranks",
    )
    tensor: int = option(
        default=1, least=1, doc="ranks that divide each layer which the layout splits; neighbours", unit="ranks"
    )

    def check(self, task: Task, processes: int, devices: str) -> None:
        sizes = self.sizes(processes)
        for axis, options in (("shard", ShardOptions), ("pipeline", PipelineOptions)):
            for field in fields(options) if sizes.by_axis()[axis] == 1 and processes > 1 else ():
                value = getattr(self, field.name)
                if field.default is not MISSING and value != field.default:
                    said = getattr(value, "value", value)
                    raise ConfigError(
                        f"strategy.{field.name}={said} is of the axis {axis}, which has one rank here; use "
                        f"strategy.{axis}=2 or more, or leave strategy.{field.name} out"
                    )
        if self.context > 1 and task.recipe.tables():
            raise ConfigError(
                f"strategy.context={self.context} divides the positions of a row, and {type(task.recipe).__name__} has "
                "sparse tables, whose rows are those of all of them; use strategy.tensor or strategy.shard"
            )
        super().check(task, processes, devices)

    def sizes(self, processes: int) -> MeshSizes:
        sizes = MeshSizes(
            replicate=self.replicate,
            pipeline=self.pipeline,
            shard=max(1, self.shard),
            context=self.context,
            tensor=self.tensor,
        )
        if self.shard == 0 and not processes % sizes.total:
            return replace(sizes, shard=processes // sizes.total)
        if sizes.total != processes:
            said = " x ".join(
                f"strategy.{axis}={size}"
                for axis, size in sizes.by_axis().items()
                if size > 1 or (axis == "shard" and self.shard)
            )
            if self.shard:
                raise ConfigError(
                    f"{said} makes {sizes.total} ranks, and launcher.processes={processes}; make the two equal, or use "
                    "strategy.shard=0, which takes what is left"
                )
            raise ConfigError(
                f"{said} makes groups of {sizes.total} ranks, which do not divide launcher.processes={processes}; use "
                f"{sizes.total * max(1, processes // sizes.total)} processes, or other sizes"
            )
        return sizes
