"""The options of parameter servers, and what follows from them alone. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.registry import option
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS

if TYPE_CHECKING:
    from dtf.api.task import Task
    from dtf.pserver.sync_modes import SyncMode

GEO_STEPS = 400
"""The value of `geo_steps` where it is null."""


class Mode(Enum):
    sync = "sync"
    async_ = "async"
    half_async = "half_async"
    geo = "geo"


class Wire(Enum):
    same = "same"
    bf16 = "bf16"
    fp16 = "fp16"


class Dense(Enum):
    pserver = "pserver"
    allreduce = "allreduce"


class Trainers(Enum):
    given = "given"
    auto = "auto"


class Device(Enum):
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True)
class PserverOptions:
    """The config node `strategy` of strategy=pserver."""

    mode: Mode = option(
        default=Mode.sync,
        doc="`sync`: gradients of all trainers make one update, the same numbers as ddp; `async`: each trainer works "
        "on global batches of its own, whose gradients are applied as they arrive; `half_async`: trainers run free, "
        "and as many gradients as there are trainers make one update; `geo`: each trains locally for `geo_steps` from "
        "the servers' state, and the servers add up the changes, each by its share of the rows",
    )
    dense: Dense = option(
        default=Dense.pserver,
        doc="where the dense parameters are: `pserver`: on servers; `allreduce`: on each trainer, as with ddp, and "
        "servers hold rows of sparse tables alone (sync)",
    )
    servers: int = option(default=1, least=1, most=MOST_PROCESSES, doc="processes that hold the state")
    trainers: Trainers = option(
        default=Trainers.given,
        doc="how many trainers there are. `given`: as launcher.processes says; `auto`: these and the servers follow "
        "from the mode and the cores of this host; what is set stays. "
        "Decided once, before processes start, and kept where a run goes on",
    )
    team: int = option(
        default=1,
        least=1,
        most=MOST_PROCESSES,
        doc="processes of each trainer, of which there are launcher.processes / team: they share the rows of each "
        "lease, add up gradients among themselves (nccl on GPUs, gloo on CPUs), and one of them talks to the servers",
    )
    hogwild_threads: int = option(
        default=1,
        least=1,
        most=MOST_THREADS,
        doc="threads of each trainer process that each work as a trainer, with one copy of the dense parameters, "
        "which any of them refreshes while the others "
        "compute (Hogwild); they divide launcher.threads. In modes async and half_async, on CPU",
    )
    staleness: int | None = option(
        default=None,
        least=0,
        doc="steps (with geo: exchanges) that may be handed out beyond the oldest that is not applied yet, in modes "
        "other than sync; 0: none, each waits for the one before; null: twice the trainers with async, 0 with geo "
        "where an optimizer averages squares (adam), else 1",
        unit="steps",
    )
    geo_steps: int | None = option(
        default=None, least=1, most=1_000_000, doc="with geo: steps between two exchanges; null: 400", unit="steps"
    )
    min_block: int = option(
        default=8192,
        least=1,
        doc="parameters are cut into slices, one for each server, no smaller than this (min_block_size of Paddle "
        "Fleet). Optimizers that look at whole tensors, such as lars, get them whole",
        unit="elements",
    )
    placement: str = option(
        default="round_robin",
        doc="which server gets which slice: `round_robin`, `hash_name`, or a function of yours, see docs/pserver.md",
    )
    wire: Wire = option(
        default=Wire.same,
        doc="format in which blocks, rows and gradients of fp32 travel: as they are, or rounded to bf16 or fp16, half "
        "the bytes. All but `same` change the numbers",
    )
    record: str = option(
        default="",
        doc="folder, in the run folder, where servers write the order of what they give and take, so that job=verify "
        "job.replay=RUN can do it again",
    )
    server_device: Device = option(
        default=Device.cpu,
        doc="where servers keep and update blocks, `cpu` or `cuda`: a GPU, which a trainer may share; tables stay in "
        "the host's memory",
    )

    @property
    def rows_alone(self) -> bool:
        """Whether trainers run the engine, and servers hold rows of tables alone."""
        return self.dense is Dense.allreduce

    def sync_mode(self, task: Task) -> SyncMode:
        """The mode as a rule over the pushes of `task`."""
        from dtf.pserver.sync_modes import Async, Geo, HalfAsync, Sync

        match self.mode:
            case Mode.sync:
                return Sync(None)
            case Mode.async_:
                return Async(self.staleness)
            case Mode.half_async:
                return HalfAsync(self.staleness)
            case Mode.geo:
                together = self.staleness is None and averaging(task)
                return Geo(0 if together else self.staleness, self.geo_steps or GEO_STEPS)

    def layout_text(self, processes: int) -> dict[str, str]:
        """For the start-up table: the layout that was chosen for this host; empty where none was."""
        if self.trainers is Trainers.given:
            return {}
        trainers = f"{processes} trainer process{'es' * (processes != 1)}"
        servers = f"{self.servers} server{'s' * (self.servers != 1)}"
        return {"layout": f"{trainers}, {servers} (strategy.trainers=auto)"}

    def count_trainers(self, processes: int) -> int:
        """How many trainers there are for `launcher.processes`, as servers count them: each team, or each thread of a
        process.
        """
        return max(1, processes // self.team) * self.hogwild_threads


def averaging(task: Task) -> list[str]:
    """The config groups whose choice keeps averages of squares. Those of states of different age may not be added up,
    so with geo all exchange at once.
    """
    rules = {"optimizer": task.optimizer, "sparse": task.rows if task.recipe.table_widths() else None}
    return [group for group, rule in rules.items() if rule is not None and rule.averages_squares]
