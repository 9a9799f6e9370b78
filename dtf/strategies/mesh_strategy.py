"""What fsdp, tensor, pipeline and mesh have in common: they spread a model over a device mesh."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.options import Compile
from dtf.api.registry import name_of, option
from dtf.api.sparse_table import Placement, Placements
from dtf.api.strategy import Program, Strategy, check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.pipeline.schedules import Schedule

if TYPE_CHECKING:
    from dtf.distributed.world import World


class Unit(Enum):
    layer = "layer"
    block = "block"
    stage = "stage"


class Balance(Enum):
    time = "time"
    flops = "flops"


class MeshStrategy(Strategy):
    """A strategy that is some sizes of the axes of a device mesh, and options. What a subclass has no option for has
    the value here.
    """

    tables: Placements = Placement.row_wise
    unit: Unit = Unit.block
    zero: int = 3
    reshard_after_forward: bool = True
    offload: bool = False
    prefetch: int = 1
    schedule: Schedule = Schedule["1f1b"]  # type: ignore[valid-type]
    virtual: int = 1
    balance: Balance = Balance.time
    cuts: Sequence[str] = ()
    memory_gb: float = 0.0

    one_share: str = "launcher.processes=1"
    """Keys with which no rows are divided."""

    @abstractmethod
    def sizes(self, processes: int) -> MeshSizes:
        """The axes of the mesh of so many processes. ConfigError where these do not make one. Torch-free."""

    def check(self, task: Task, processes: int, devices: str) -> None:
        check_tables(task, self.tables, processes)
        sizes = self.sizes(processes)
        if self.offload and sizes.shard == 1:
            raise ConfigError(
                "strategy.offload=true needs at least 2 processes that hold slices of parameters; use offload=false, "
                "or launcher.processes=2 and more"
            )
        if self.offload and devices == "cpu":
            raise ConfigError(
                "strategy.offload=true moves parameters from GPUs to the host, this run is on cpu, where they are "
                "already; use offload=false"
            )
        self._check_stages(sizes.pipeline)

    def _check_stages(self, ranks: int) -> None:
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
        sizes = self.sizes(processes)
        if sizes.replicate > 1:
            return super().unguarded(processes)
        if sizes.shares > 1 or processes == 1:
            return "each slice of a parameter is on one rank; use strategy.replicate=2 or more"
        return f"all ranks form one replica; use more processes than the {sizes}"

    def uncompiled(self, kind: Compile, processes: int) -> str:
        sizes = self.sizes(processes)
        if sizes.layer_ranks > 1:
            return (
                "divided layers talk to other ranks in the middle of what would be one piece; use strategy=fsdp, or "
                "step.compile=off"
            )
        if kind is Compile.model and sizes.pipeline > 1:
            return "stages divide the model; use step.compile=blocks, or step.compile=off"
        if kind is Compile.model and sizes.shard > 1:
            return "parameters are gathered part by part within a pass; use step.compile=blocks, or step.compile=off"
        if self.unit is Unit.layer and sizes.shard > 1:
            return "strategy.unit=layer gathers parameters within a block; use strategy.unit=block, or step.compile=off"
        return ""

    def communication(self, devices: str) -> str | None:
        return "nccl" if devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        from dtf.strategies.mesh_program import mesh_program
        from dtf.strategies.pipeline.setup import pipeline_program
        from dtf.strategies.spmd import single_process

        if world.size == 1:
            return single_process(task, world)
        sizes, name = self.sizes(world.size), f"strategy={name_of('strategy', self)}"
        return (pipeline_program if sizes.pipeline > 1 else mesh_program)(self, name, sizes, task, world)


@dataclass(kw_only=True)
class TableOptions:
    """How sparse tables are placed."""

    tables: Placements = option(
        default=Placement.row_wise,
        doc="how sparse tables are sharded: `rows` (or `row_wise`): by a hash of the id; `columns` (`column_wise`): "
        "each rank some columns of all rows; `tables` (`table_wise`): each rank whole tables; `replicated`: not at "
        "all; `auto`: for each table what sends least; or a mapping of tables to these",
    )


@dataclass(kw_only=True)
class ShardOptions:
    """How parameters, gradients and optimizer state are in slices."""

    unit: Unit = option(
        default=Unit.block,
        doc="what is gathered at once: each layer, each block that the recipe's layout names or that is found in the "
        "model, or the blocks of each stage together; a model that repeats no block is cut into eight parts of equal "
        "size, for `block` and `stage`, unless the layout names blocks",
    )
    zero: int = option(
        default=3,
        least=1,
        most=3,
        doc="what is in slices between passes, the stage of ZeRO: 1: the optimizer state; 2: also gradients, which are "
        "reduce-scattered after each micro-batch; 3: also parameters. With 1 and 2 parameters are gathered once a step "
        "and held until its last backward pass",
    )
    reshard_after_forward: bool = option(
        default=True,
        doc="drop gathered parameters between forward and backward: less memory, one more gathering; for zero=3",
    )
    offload: bool = option(
        default=False, doc="keep parameters, gradients and optimizer state in host memory; the update runs there"
    )
    prefetch: int = option(
        default=1,
        least=0,
        doc="units gathered ahead of the one that computes; 0: torch's own choice, the next one in backward on CUDA",
        unit="units",
    )


@dataclass(kw_only=True)
class PipelineOptions:
    """How a model is cut into stages, and in which order they compute."""

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
