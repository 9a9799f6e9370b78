"""Data parallelism inside one process: replicas run by threads, on GPUs or on the cores of a CPU."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.strategy import Program, Strategy
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS

if TYPE_CHECKING:
    from dtf.api.options import Compile
    from dtf.distributed.world import World


class Reduce(Enum):
    all = "all"
    owner = "owner"


@register("strategy", "dp")
class Dp(Strategy):
    """One process holds a replica per device; each computes its share of the micro-batches in a thread of its own.

    What torch.nn.DataParallel does, with replicas that live as long as the run: it copies the module anew in every step
    and keeps the running statistics of the first replica only, which gives other numbers than one device.
    """

    replicas: int = option(
        default=0,
        least=0,
        most=MOST_PROCESSES,
        doc="model replicas; 0: as many as launcher.processes, or strategy.device_ids",
    )
    threads: int = option(
        default=0,
        least=0,
        most=MOST_THREADS,
        doc="intra-op threads of each replica on CPU; 0: the process's threads divided by replicas",
    )
    device_ids: list[int] = option(
        factory=list,
        least=0,
        doc="CUDA devices, one replica each, of which the first sums metrics, and gradients with reduce=owner; empty: "
        "those of the launcher",
    )
    reduce: Reduce = option(
        default=Reduce.owner,
        doc="`owner`: one replica sums the gradients, updates and sends parameters to the others; `all`: every replica "
        "gets the sum and runs the optimizer itself, which costs its memory on every device",
    )

    def roles(self, processes: int) -> dict[str, int]:
        return {"trainer": 1}

    def check(self, task: Task, processes: int, devices: str) -> None:
        if devices == "cuda" and self.threads:
            raise ConfigError(
                f"strategy.threads={self.threads} is for replicas on CPU, this run is on cuda; leave it at 0"
            )
        if devices != "cuda" and self.device_ids:
            raise ConfigError(
                f"strategy.device_ids={self.device_ids} names CUDA devices, this run is on {devices}; use "
                "strategy.replicas"
            )
        if self.device_ids and self.replicas not in (0, len(self.device_ids)):
            raise ConfigError(
                f"strategy.replicas={self.replicas} is not the number of strategy.device_ids={self.device_ids}; leave "
                "one of them out"
            )
        if len(set(self.device_ids)) != len(self.device_ids):
            raise ConfigError(f"strategy.device_ids={self.device_ids} names a device twice")
        ids = self.device_ids or range(self.replicas or processes)
        if self.threads * len(ids) > MOST_THREADS:
            raise ConfigError(
                f"strategy.threads={self.threads} must be at most {MOST_THREADS // len(ids)} for {len(ids)} replicas; "
                "0 divides the cores"
            )

    def unguarded(self, processes: int) -> str:
        count = self.replicas or len(self.device_ids) or processes
        if count == 1:
            return "there is one replica; use strategy.replicas=2 or more"
        if self.reduce is Reduce.owner:
            return "all replicas copy the parameters of the first one in each step; use strategy.reduce=all"
        return ""

    def uncompiled(self, kind: Compile, processes: int) -> str:
        return ""

    def communication(self, devices: str) -> str | None:
        return None

    def setup(self, task: Task, world: World) -> Program:
        import torch

        from dtf.strategies.dp_program import DataParallelProgram
        from dtf.strategies.spmd import single_process

        count = self.replicas or len(self.device_ids) or world.slots
        if count == 1 and world.device.type == "cpu" and not self.threads:
            return single_process(task, world)
        if world.device.type == "cpu":
            devices = [world.device] * count
        else:
            ids = self.device_ids or [torch.device(name).index for name in world.place.devices[:count]]
            if len(ids) < count:
                raise ConfigError(
                    f"strategy.replicas={count} needs as many GPUs, the launcher has {len(ids)}; raise "
                    "launcher.processes or name strategy.device_ids"
                )
            if max(ids) >= torch.cuda.device_count():
                raise ConfigError(
                    f"strategy.device_ids={ids}: this machine has {torch.cuda.device_count()} CUDA devices"
                )
            devices = [torch.device("cuda", i) for i in ids]
        threads = self.threads or max(1, torch.get_num_threads() // count)
        return DataParallelProgram(task, world, devices, threads, every=self.reduce is Reduce.all)
