"""Parameter servers: some processes hold the state, others compute on what they pull and push gradients."""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from dtf.devices import MOST_PROCESSES
from dtf.errors import ConfigError
from dtf.registry import option, register
from dtf.strategy import Errand, Program, Strategy, Task

if TYPE_CHECKING:
    from dtf.pserver.merging import Merging
    from dtf.world import World


class Mode(Enum):
    sync = "sync"
    async_ = "async"
    half_async = "half_async"
    geo = "geo"


@register("strategy", "pserver")
class Pserver(Strategy):
    """Servers hold parameters and tables, each a part, and run the engine; trainers pull what a batch needs, compute, and push gradients.

    Bytes per step and trainer: twice the parameters, and 2 x U x (8 + width x format) for U distinct ids of its rows.
    """

    mode: Mode = option(
        default=Mode.sync,
        doc="`sync`: gradients of all trainers make one update, the same numbers as ddp; `async`: each trainer works on global batches of its own, whose "
        "gradients are applied as they arrive; `half_async`: trainers run free, and `gather` gradients make one update; `geo`: each trains by itself for "
        "`geo_steps`, from the servers' state, and what they learnt is added up there, each by its share of the rows",
    )
    servers: int = option(default=1, least=1, most=MOST_PROCESSES, doc="processes that hold the state")
    trainers: int = option(default=0, least=0, most=MOST_PROCESSES, doc="processes that compute; 0: launcher.processes")
    staleness: int | None = option(
        default=None,
        least=0,
        doc="steps (with geo: exchanges) that may be handed out beyond the oldest that is not applied yet, in modes other than sync; null: twice the trainers "
        "with async, else 1; 0: none, each waits for the one before",
        unit="steps",
    )
    geo_steps: int = option(default=400, least=1, most=1_000_000, doc="with geo: steps between two exchanges", unit="steps")
    gather: int = option(default=0, least=0, doc="with half_async: pushes that make one update; 0: as many as trainers")
    slice_parameters: bool = option(default=True, doc="cut parameters into a slice for each server, along their first axis")
    min_block: int = option(default=8192, least=1, doc="no smaller slices than this", unit="elements")
    placement: str = option(default="round_robin", doc="which server gets which slice: `round_robin`, `hash_name`, or a function of yours, see docs/pserver.md")
    send_queue: int = option(default=1, least=0, doc="pushes on their way while the next batch is computed, in modes other than sync")
    record: str = option(
        default="", doc="folder, in the run folder, where servers write the order of what they give and take, so that job=verify job.replay=RUN can do it again"
    )
    rpc_threads: int = option(default=0, least=0, most=1024, doc="threads of a server that answer trainers; 0: four, and two for each trainer")

    replaceable: ClassVar[frozenset[str]] = frozenset({"trainer"})

    def roles(self, processes: int) -> dict[str, int]:
        return {"server": self.servers, "trainer": self.trainers or processes}

    def check(self, task: Task, processes: int, devices: str) -> None:
        if find_spec("grpc") is None:
            raise ConfigError("strategy=pserver needs grpcio, which is not installed: python -m pip install 'dtf[pserver]'")
        several = self.servers > 1
        exact = self.mode is Mode.sync
        if self.gather and self.mode is not Mode.half_async:
            raise ConfigError(f"strategy.gather={self.gather} is for strategy.mode=half_async, this is {self.mode.value}; leave it at 0")
        if self.staleness is not None and exact:
            raise ConfigError(f"strategy.staleness={self.staleness} is for modes other than sync, which has none; leave it at null")
        if task.precision.loss_scale and not exact:
            raise ConfigError(
                "a loss scale is found step by step, and strategy.mode=" + f"{self.mode.value} has none that all share; use precision=bf16, or sync"
            )
        if several and task.step.clip_norm and self.mode is Mode.half_async and not self.merging().together:
            raise ConfigError(
                f"step.clip_norm={task.step.clip_norm:g} needs the norm of what is merged, and with strategy.mode=half_async no server has all of it; "
                "use strategy.servers=1, or strategy.staleness=0"
            )
        if self.mode is Mode.geo and task.rows is not None and task.recipe.table_widths() and task.rows.shrinkage(1.0):
            raise ConfigError("strategy.mode=geo exchanges the rows that a trainer met, and sparse.weight_decay shrinks all others too; set it to 0")
        if several and self.slice_parameters and task.optimizer.by_tensor:
            raise ConfigError(f"{type(task.optimizer).__name__} looks at whole tensors, which strategy.slice_parameters=true cuts; set it to false")

    def communication(self, devices: str) -> str | None:
        return "gloo"

    def merging(self) -> Merging:
        """The mode as a rule over pushes."""
        from dtf.pserver.merging import Async, Geo, HalfAsync, Sync

        match self.mode:
            case Mode.sync:
                return Sync(None)
            case Mode.async_:
                return Async(self.staleness)
            case Mode.half_async:
                return HalfAsync(self.staleness, self.gather)
            case Mode.geo:
                return Geo(self.staleness, self.geo_steps)

    def setup(self, task: Task, world: World) -> Program:
        from dtf.pserver.session import serve

        return serve(task, world, self, self._trainers(world.slots))

    def assist(self, task: Task, errand: Errand) -> None:
        from dtf.pserver.session import train

        train(task, errand, self, self._trainers(errand.place.slots))

    def _trainers(self, processes: int) -> int:
        return self.trainers or processes
