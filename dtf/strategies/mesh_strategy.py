"""What fsdp, tensor, pipeline and mesh have in common: they spread a model over a device mesh."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dtf.api.options import Compile
from dtf.api.registry import name_of
from dtf.api.strategy import Program, Strategy, check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.mesh_options import MeshOptions, Unit

if TYPE_CHECKING:
    from dtf.distributed.world import World


class MeshStrategy(MeshOptions, Strategy):
    """A strategy that is some sizes of the axes of a device mesh, and options."""

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
        if self.zero < 3 and sizes.shard == 1 and processes > 1:
            raise ConfigError(
                f"strategy.zero={self.zero} says what ranks have in slices, and {sizes} leaves one rank to each; use "
                "more processes, another size of the other axes, or strategy.zero=3"
            )
        if self.zero < 3 and not self.reshard_after_forward:
            raise ConfigError(
                "strategy.reshard_after_forward=false keeps what strategy.zero=3 drops after each forward pass; with "
                f"strategy.zero={self.zero} it is kept until the last backward pass of a step; leave it out"
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
