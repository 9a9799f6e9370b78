"""The options of parameter servers, and what follows from them alone. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.launcher import LONGEST_S
from dtf.api.registry import option
from dtf.api.strategy import ExternalProcess
from dtf.core.errors import ConfigError
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS
from dtf.pserver import manual_start

if TYPE_CHECKING:
    from dtf.api.task import Task
    from dtf.pserver.sync_modes import SyncMode

GEO_STEPS, PATIENCE_S = 400, 600.0
"""The values of `geo_steps` and `meet_timeout_s` where they are null."""


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


class Role(Enum):
    server = "server"
    trainer = "trainer"


class Device(Enum):
    cpu = "cpu"
    cuda = "cuda"


class TlsMode(Enum):
    none = "none"
    tls = "tls"
    mtls = "mtls"


@dataclass(kw_only=True)
class TlsOptions:
    """PEM files by which processes authenticate each other on a network that others can reach."""

    mode: TlsMode = option(
        default=TlsMode.none,
        doc="`none`; `tls`: servers show a certificate, and what passes is encrypted; `mtls`: trainers show one too",
    )
    ca: str = option(
        default="", doc="who vouches for the others: the authority's certificate, or the one certificate that all have"
    )
    cert: str = option(
        default="",
        doc="this process's certificate, for the host as strategy.endpoints names it; trainers need one with mtls",
    )
    key: str = option(default="", doc="the private key of cert")

    @property
    def mutual(self) -> bool:
        return self.mode is TlsMode.mtls

    def files(self) -> dict[str, str]:
        """The paths that are given, by name; empty without TLS."""
        paths = {"ca": self.ca, "cert": self.cert, "key": self.key} if self.mode is not TlsMode.none else {}
        return {name: path for name, path in paths.items() if path}

    def check(self, serves: bool, asks: bool) -> None:
        """Raise ConfigError where a file is missing that this process needs. `serves`: it is a server; `asks`: it is a
        client.
        """
        if self.mode is TlsMode.none:
            names = [name for name in ("ca", "cert", "key") if getattr(self, name)]
            if names:
                raise ConfigError(
                    f"strategy.tls.{names[0]} is given and strategy.tls.mode=none uses no file; set it to tls or mtls"
                )
            return
        needed = ({"cert", "key"} if serves or self.mutual else set()) | ({"ca"} if asks or self.mutual else set())
        manual_start.check_files("strategy.tls", self.files(), sorted(needed))


@dataclass(kw_only=True)
class PserverOptions:
    """The config node `strategy` of strategy=pserver."""

    mode: Mode = option(
        default=Mode.sync,
        doc="`sync`: gradients of all trainers make one update, the same numbers as ddp; `async`: each trainer works "
        "on global batches of its own, whose gradients are applied as they arrive; `half_async`: trainers run free, "
        "and `gather` gradients make one update; `geo`: each trains locally for `geo_steps` from the servers' state, "
        "and the servers add up the changes, each by its share of the rows",
    )
    dense: Dense = option(
        default=Dense.pserver,
        doc="where the dense parameters are: `pserver`: on servers; `allreduce`: on each trainer, as with ddp, and "
        "servers hold rows of sparse tables alone (sync)",
    )
    servers: int = option(default=1, least=1, most=MOST_PROCESSES, doc="processes that hold the state")
    trainers: int = option(
        default=0,
        least=0,
        most=MOST_PROCESSES,
        doc="how many trainers compute, each in `team` processes; 0: launcher.processes / team",
    )
    team: int = option(
        default=1,
        least=1,
        most=MOST_PROCESSES,
        doc="processes of a trainer: they share the rows of each lease, add up gradients among themselves (nccl on "
        "GPUs, gloo on CPUs), and one of them talks to the servers",
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
        "the bytes. All but `same` change the numbers",
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
        doc="HOST:PORT of each server, in order, for processes that are started externally, a command for each; empty: "
        "the launcher starts all. Also DTF_ENDPOINTS, with commas between",
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
        doc="file that only you can read, with the secret that all externally started processes share; also DTF_TOKEN, "
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

    @property
    def rows_alone(self) -> bool:
        """Whether trainers run the engine, and servers hold rows of tables alone."""
        return self.dense is Dense.allreduce

    def count(self) -> int:
        """How many servers there are."""
        return len(self.where()) or self.servers

    def where(self) -> list[str]:
        """The endpoints of externally started servers; empty where a launcher starts them."""
        return self.endpoints or manual_start.endpoints()

    @property
    def patience_s(self) -> float:
        """How long externally started processes wait for servers."""
        return PATIENCE_S if self.meet_timeout_s is None else self.meet_timeout_s

    def sync_mode(self, task: Task) -> SyncMode:
        """The mode as a rule over the pushes of `task`."""
        from dtf.pserver.sync_modes import Async, Geo, HalfAsync, Sync

        match self.mode:
            case Mode.sync:
                return Sync(None)
            case Mode.async_:
                return Async(self.staleness)
            case Mode.half_async:
                return HalfAsync(self.staleness, self.gather)
            case Mode.geo:
                together = self.staleness is None and averaging(task)
                return Geo(0 if together else self.staleness, self.geo_steps or GEO_STEPS)

    def count_trainers(self, processes: int) -> int:
        """How many trainers there are for `launcher.processes`, as servers count them: each team, or each thread of a
        process.
        """
        return (self.trainers or max(1, processes // self.team)) * self.hogwild_threads

    def external_process(self) -> ExternalProcess | None:
        """See `Strategy.external_process`."""
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
                "strategy.trainers=0 leaves the number to the launcher, and externally started processes have none; "
                "give strategy.trainers=N, alike everywhere"
            )
        role, number = manual_start.role_and_number(
            self.role.value if self.role else "", self.server_id, self.trainer_id, len(endpoints)
        )
        rank = number if role == "server" else len(endpoints) + number
        return ExternalProcess(role, rank, manual_start.addresses(endpoints)[0], manual_start.token(self.token_file))


def averaging(task: Task) -> list[str]:
    """The config groups whose choice keeps averages of squares. Those of states of different age may not be added up,
    so with geo all exchange at once.
    """
    rules = {"optimizer": task.optimizer, "sparse": task.rows if task.recipe.table_widths() else None}
    return [group for group, rule in rules.items() if rule is not None and rule.averages_squares]
