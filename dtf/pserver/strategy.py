"""Parameter servers: some processes hold the state, others compute on what they pull and push gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dtf.api.launcher import LONGEST_S
from dtf.api.registry import option, register
from dtf.api.strategy import Alone, Errand, Program, Standing, Strategy, Task, check_divides
from dtf.core.errors import ConfigError
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS
from dtf.pserver import manual_start
from dtf.pserver.checks import check
from dtf.pserver.choices import Dense, Device, Mode, Role, TlsOptions, Wire

if TYPE_CHECKING:
    from dtf.distributed.world import World
    from dtf.pserver.server.sync_modes import Merging
    from dtf.pserver.session import Post

GEO_STEPS, PATIENCE_S = 400, 600.0
"""Where `geo_steps` and `meet_timeout_s` say nothing."""


@register("strategy", "pserver")
class Pserver(Strategy):
    """Servers hold parameters and tables, each a part, and run the engine; trainers pull what a batch needs, compute,
    and push gradients.

    Bytes per step and trainer: twice the parameters, and 2 x U x (8 + width x format) for U distinct ids of its rows.
    """

    mode: Mode = option(
        default=Mode.sync,
        doc="`sync`: gradients of all trainers make one update, the same numbers as ddp; `async`: each trainer works "
        "on global batches of its own, whose "
        "gradients are applied as they arrive; `half_async`: trainers run free, and `gather` gradients make one "
        "update; `geo`: each trains by itself for "
        "`geo_steps`, from the servers' state, and what they learnt is added up there, each by its share of the rows",
    )
    dense: Dense = option(
        default=Dense.pserver,
        doc="who holds what is no sparse table: `pserver`: servers do; `allreduce`: each trainer, as with ddp, and "
        "servers hold rows alone (sync)",
    )
    servers: int = option(default=1, least=1, most=MOST_PROCESSES, doc="processes that hold the state")
    trainers: int = option(
        default=0,
        least=0,
        most=MOST_PROCESSES,
        doc="who computes, each in `team` processes; 0: launcher.processes / team",
    )
    team: int = option(
        default=1,
        least=1,
        most=MOST_PROCESSES,
        doc="processes of a trainer: they share the rows of each lease, add up gradients among themselves (nccl on "
        "GPUs, gloo on CPUs), and one of them "
        "alone speaks with the servers",
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
        "other than sync; null: twice the trainers "
        "with async, else 1; 0: none, each waits for the one before",
        unit="steps",
    )
    geo_steps: int | None = option(
        default=None, least=1, most=1_000_000, doc="with geo: steps between two exchanges; null: 400", unit="steps"
    )
    gather: int = option(default=0, least=0, doc="with half_async: pushes that make one update; 0: as many as trainers")
    slice_parameters: bool = option(
        default=True, doc="cut parameters into a slice for each server, along their first axis"
    )
    min_block: int = option(default=8192, least=1, doc="no smaller slices than this", unit="elements")
    placement: str = option(
        default="round_robin",
        doc="which server gets which slice: `round_robin`, `hash_name`, or a function of yours, see docs/pserver.md",
    )
    wire: Wire = option(
        default=Wire.same,
        doc="format in which blocks, rows and gradients of fp32 travel: as they are, or rounded to bf16 or fp16, half "
        "the bytes. "
        "All but `same` change the numbers",
    )
    send_queue: int = option(
        default=1, least=0, doc="pushes on their way while the next batch is computed, in modes other than sync"
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
    endpoints: list[str] = option(
        factory=list,
        doc="HOST:PORT of each server, in order, for processes that are started by hand, a command for each; empty: "
        "the launcher starts all. "
        "Also DTF_ENDPOINTS, with commas between",
    )
    role: Role | None = option(
        default=None, doc="with endpoints: what this command starts, `server` or `trainer`; also DTF_ROLE"
    )
    server_id: int | None = option(
        default=None, least=0, doc="which of the endpoints this server is, from 0; also DTF_SERVER_ID"
    )
    trainer_id: int | None = option(
        default=None,
        least=0,
        most=MOST_PROCESSES - 1,
        doc="a number for this trainer that no other one of the run has; also DTF_TRAINER_ID",
    )
    token_file: str = option(
        default="",
        doc="file that only you can read, with the secret that all processes started by hand share; also DTF_TOKEN, "
        "the secret",
    )
    meet_timeout_s: float | None = option(
        default=None,
        above=0,
        most=LONGEST_S,
        doc="with endpoints: how long to wait for servers, at first and after they were lost; null: 600",
        unit="s",
    )
    tls: TlsOptions = option(factory=TlsOptions, doc="certificates, for networks that others can reach")
    allow_insecure: bool = option(
        default=False, doc="let endpoints beyond this host pass everything unencrypted, the token included"
    )
    rpc_threads: int = option(
        default=0, least=0, most=1024, doc="threads of a server that answer trainers; 0: four, and two for each trainer"
    )

    def __post_init__(self) -> None:
        self._post: Post | None = None  # of a server, from `meet` on; no field, which would be a config key

    @property
    def replaceable(self) -> frozenset[str]:
        return frozenset() if self.rows_alone else frozenset({"trainer"})

    def roles(self, processes: int) -> dict[str, int]:
        roles = {"server": self.count(), "trainer": self.trainers * self.team or processes}
        return dict(reversed(roles.items())) if self.rows_alone else roles

    def check_processes(self, given: int) -> None:
        if self.trainers and given != self.trainers * self.team and not self.where():
            raise ConfigError(
                f"launcher.processes={given} and strategy.trainers={self.trainers} of {self.team} process(es) differ; "
                "leave one of them out"
            )

    @property
    def rows_alone(self) -> bool:
        """Whether trainers run the engine, and servers help them."""
        return self.dense is Dense.allreduce

    def count(self) -> int:
        """How many servers there are."""
        return len(self.where()) or self.servers

    def where(self) -> list[str]:
        """The endpoints of servers that are started by hand; none where a launcher starts them."""
        return self.endpoints or manual_start.endpoints()

    @property
    def patience_s(self) -> float:
        """How long those who were started by hand wait for servers."""
        return PATIENCE_S if self.meet_timeout_s is None else self.meet_timeout_s

    def computes_on_device(self, role: str) -> bool:
        return role == "trainer" or self.server_device is Device.cuda

    def alone(self) -> Alone | None:
        endpoints = self.where()
        if not endpoints:
            manual_start.refuse_without_endpoints(self.role, self.server_id, self.trainer_id)
            return None
        if self.servers not in (1, len(endpoints)):
            raise ConfigError(
                f"strategy.servers={self.servers} and strategy.endpoints has {len(endpoints)}; leave strategy.servers "
                "out"
            )
        if not self.trainers:
            raise ConfigError(
                "strategy.trainers=0 leaves the number to the launcher, and by hand there is none for all; give "
                "strategy.trainers=N, alike everywhere"
            )
        role, number = manual_start.standing(
            self.role.value if self.role else "", self.server_id, self.trainer_id, len(endpoints)
        )
        rank = number if role == "server" else len(endpoints) + number
        return Alone(role, rank, manual_start.addresses(endpoints)[0], manual_start.token(self.token_file))

    def hints(self, processes: int) -> list[str]:
        servers, trainers = self.count(), self.count_trainers(processes)
        if servers <= trainers:
            return []
        return [
            f"{servers} servers for {trainers} trainer(s): more servers than trainers mostly wait; use fewer, unless "
            "the tables need the memory of all"
        ]

    def check(self, task: Task, processes: int, devices: str) -> None:
        if find_spec("grpc") is None:
            raise ConfigError(
                "strategy=pserver needs grpcio, which is not installed: python -m pip install 'dtf[pserver]'"
            )
        if not self.trainers:
            check_divides("strategy.team", self.team, processes)
        check(self, task, self.count_trainers(processes), devices)

    def communication(self, devices: str) -> str | None:
        return "nccl" if self.rows_alone and devices == "cuda" else "gloo"

    def merging(self) -> Merging:
        """The mode as a rule over pushes."""
        from dtf.pserver.server.sync_modes import Async, Geo, HalfAsync, Sync

        match self.mode:
            case Mode.sync:
                return Sync(None)
            case Mode.async_:
                return Async(self.staleness)
            case Mode.half_async:
                return HalfAsync(self.staleness, self.gather)
            case Mode.geo:
                return Geo(self.staleness, self.geo_steps or GEO_STEPS)

    def meet(self, standing: Standing) -> Standing:
        from dtf.pserver.session import meet

        standing, self._post = meet(standing, self, self.count_trainers(standing.place.slots))
        return standing

    def setup(self, task: Task, world: World) -> Program:
        if self.rows_alone:
            return self._replica(task, world)
        from dtf.pserver.session import Post, serve

        return serve(task, world, self, self.count_trainers(world.slots), self._post or Post())

    def _replica(self, task: Task, world: World) -> Program:
        """ddp's program, with rows elsewhere."""
        from dtf.model.init import cast_model, draw_model
        from dtf.optim.update import LocalUpdate, whole
        from dtf.pserver.session import servers
        from dtf.pserver.trainer.remote_tables import Assisted, RemoteTables
        from dtf.strategies.ddp_wrap import on_their_way, reduced
        from dtf.strategies.spmd import Replica, workload

        model = draw_model(task.recipe, task.seed, task.weights)
        masters = cast_model(model, task.precision, world.device)
        several = world.size > 1
        forward, exchange = (
            (reduced(model), on_their_way(model, workload(task, world.size)[0])) if several else (None, 0)
        )
        tables = RemoteTables(task, world, 1 / world.size, lambda: servers(world.place, self))
        options = task.optimizer, task.step.clip_norm, task.precision.loss_scale
        update = LocalUpdate(whole(model, masters), *options, writes=world.rank == 0, tables=tables)
        return Assisted(
            Replica(model, task, world.device, forward), update, task, world, exchange=exchange, tables=tables
        )

    def assist(self, task: Task, errand: Errand) -> None:
        if self.rows_alone:
            from dtf.checkpoint.checkpointer import Stored, write_boxes
            from dtf.pserver.session import lend

            lend(task, errand, self, self.count_trainers(errand.place.slots), Stored, write_boxes)
        else:
            from dtf.pserver.session import train

            train(task, errand, self, self.count_trainers(errand.place.slots))

    def count_trainers(self, processes: int) -> int:
        """As servers count them, for `launcher.processes`: each team, or each thread of a process."""
        return (self.trainers or max(1, processes // self.team)) * self.hogwild_threads
