"""Parameter servers: some processes hold the state, others compute on what they pull and push gradients."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dtf import by_hand
from dtf.devices import MOST_PROCESSES, MOST_THREADS
from dtf.errors import ConfigError
from dtf.launcher import LONGEST_S
from dtf.precision import Format
from dtf.pserver.placing import check_placement
from dtf.registry import name_of, option, register
from dtf.schema import KeyProblem
from dtf.strategy import Alone, Errand, Program, Standing, Strategy, Task, check_divides

if TYPE_CHECKING:
    from dtf.pserver.merging import Merging
    from dtf.pserver.session import Post
    from dtf.world import World

_FOLDER, _TAKEN = re.compile(r"[A-Za-z0-9_-]{1,128}"), ("checkpoints", "profile", "seconds")
_SWITCHES = ("yes", "no", "on", "off")  # true and false are no text


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
    """Files in PEM, by which processes know each other on a network that others can reach."""

    mode: TlsMode = option(default=TlsMode.none, doc="`none`; `tls`: servers show a certificate, and what passes is encrypted; `mtls`: trainers show one too")
    ca: str = option(default="", doc="who vouches for the others: the authority's certificate, or the one certificate that all have")
    cert: str = option(default="", doc="this process's certificate, for the host as strategy.endpoints names it; trainers need one with mtls")
    key: str = option(default="", doc="the private key of cert")

    @property
    def mutual(self) -> bool:
        return self.mode is TlsMode.mtls

    def files(self) -> dict[str, str]:
        """The paths of those that are given, by name; none without TLS."""
        given = {"ca": self.ca, "cert": self.cert, "key": self.key} if self.mode is not TlsMode.none else {}
        return {name: path for name, path in given.items() if path}

    def check(self, serves: bool, asks: bool) -> None:
        """Raise ConfigError where a file is missing that a process needs which serves others, or asks them."""
        if self.mode is TlsMode.none:
            given = [name for name in ("ca", "cert", "key") if getattr(self, name)]
            if given:
                raise ConfigError(f"strategy.tls.{given[0]} is given and strategy.tls.mode=none uses no file; set it to tls or mtls")
            return
        needed = ({"cert", "key"} if serves or self.mutual else set()) | ({"ca"} if asks or self.mutual else set())
        by_hand.check_files("strategy.tls", self.files(), sorted(needed))


GEO_STEPS, PATIENCE_S = 400, 600.0
"""Where `geo_steps` and `meet_timeout_s` say nothing."""


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
    dense: Dense = option(
        default=Dense.pserver,
        doc="who holds what is no sparse table: `pserver`: servers do; `allreduce`: each trainer, as with ddp, and servers hold rows alone (sync)",
    )
    servers: int = option(default=1, least=1, most=MOST_PROCESSES, doc="processes that hold the state")
    trainers: int = option(default=0, least=0, most=MOST_PROCESSES, doc="who computes, each in `team` processes; 0: launcher.processes / team")
    team: int = option(
        default=1,
        least=1,
        most=MOST_PROCESSES,
        doc="processes of a trainer: they share the rows of each lease, add up gradients among themselves (nccl on GPUs, gloo on CPUs), and one of them "
        "alone speaks with the servers",
    )
    hogwild_threads: int = option(
        default=1,
        least=1,
        most=MOST_THREADS,
        doc="threads of each trainer process that each work as a trainer, with one copy of the dense parameters, which any of them refreshes while the others "
        "compute (Hogwild); they divide launcher.threads. In modes async and half_async, on CPU",
    )
    staleness: int | None = option(
        default=None,
        least=0,
        doc="steps (with geo: exchanges) that may be handed out beyond the oldest that is not applied yet, in modes other than sync; null: twice the trainers "
        "with async, else 1; 0: none, each waits for the one before",
        unit="steps",
    )
    geo_steps: int | None = option(default=None, least=1, most=1_000_000, doc="with geo: steps between two exchanges; null: 400", unit="steps")
    gather: int = option(default=0, least=0, doc="with half_async: pushes that make one update; 0: as many as trainers")
    slice_parameters: bool = option(default=True, doc="cut parameters into a slice for each server, along their first axis")
    min_block: int = option(default=8192, least=1, doc="no smaller slices than this", unit="elements")
    placement: str = option(default="round_robin", doc="which server gets which slice: `round_robin`, `hash_name`, or a function of yours, see docs/pserver.md")
    wire: Wire = option(
        default=Wire.same,
        doc="format in which blocks, rows and gradients of fp32 travel: as they are, or rounded to bf16 or fp16, half the bytes. "
        "All but `same` change the numbers",
    )
    send_queue: int = option(default=1, least=0, doc="pushes on their way while the next batch is computed, in modes other than sync")
    record: str = option(
        default="", doc="folder, in the run folder, where servers write the order of what they give and take, so that job=verify job.replay=RUN can do it again"
    )
    server_device: Device = option(
        default=Device.cpu, doc="where servers keep and update blocks, `cpu` or `cuda`: a GPU, which a trainer may share; tables stay in the host's memory"
    )
    endpoints: list[str] = option(
        factory=list,
        doc="HOST:PORT of each server, in order, for processes that are started by hand, a command for each; empty: the launcher starts all. "
        "Also DTF_ENDPOINTS, with commas between",
    )
    role: Role | None = option(default=None, doc="with endpoints: what this command starts, `server` or `trainer`; also DTF_ROLE")
    server_id: int | None = option(default=None, least=0, doc="which of the endpoints this server is, from 0; also DTF_SERVER_ID")
    trainer_id: int | None = option(
        default=None, least=0, most=MOST_PROCESSES - 1, doc="a number for this trainer that no other one of the run has; also DTF_TRAINER_ID"
    )
    token_file: str = option(
        default="", doc="file that only you can read, with the secret that all processes started by hand share; also DTF_TOKEN, the secret"
    )
    meet_timeout_s: float | None = option(
        default=None, above=0, most=LONGEST_S, doc="with endpoints: how long to wait for servers, at first and after they were lost; null: 600", unit="s"
    )
    tls: TlsOptions = option(factory=TlsOptions, doc="certificates, for networks that others can reach")
    allow_insecure: bool = option(default=False, doc="let endpoints beyond this host pass everything unencrypted, the token included")
    rpc_threads: int = option(default=0, least=0, most=1024, doc="threads of a server that answer trainers; 0: four, and two for each trainer")

    def __post_init__(self) -> None:
        self._post: Post | None = None  # of a server, from `meet` on; no field, which would be a config key

    @property
    def replaceable(self) -> frozenset[str]:
        return frozenset() if self._rows_alone else frozenset({"trainer"})

    def roles(self, processes: int) -> dict[str, int]:
        roles = {"server": self.count(), "trainer": self.trainers * self.team or processes}
        return dict(reversed(roles.items())) if self._rows_alone else roles

    @property
    def _rows_alone(self) -> bool:
        """Whether trainers run the engine, and servers help them."""
        return self.dense is Dense.allreduce

    def count(self) -> int:
        """How many servers there are."""
        return len(self.where()) or self.servers

    def where(self) -> list[str]:
        """The endpoints of servers that are started by hand; none where a launcher starts them."""
        return self.endpoints or by_hand.endpoints()

    @property
    def patience_s(self) -> float:
        """How long those who were started by hand wait for servers."""
        return PATIENCE_S if self.meet_timeout_s is None else self.meet_timeout_s

    def computes_on_device(self, role: str) -> bool:
        return role == "trainer" or self.server_device is Device.cuda

    def alone(self) -> Alone | None:
        endpoints = self.where()
        if not endpoints:
            by_hand.refuse_without_endpoints(self.role, self.server_id, self.trainer_id)
            return None
        if self.servers not in (1, len(endpoints)):
            raise ConfigError(f"strategy.servers={self.servers} and strategy.endpoints has {len(endpoints)}; leave strategy.servers out")
        if not self.trainers:
            raise ConfigError(
                "strategy.trainers=0 leaves the number to the launcher, and by hand there is none for all; give strategy.trainers=N, alike everywhere"
            )
        role, number = by_hand.standing(self.role.value if self.role else "", self.server_id, self.trainer_id, len(endpoints))
        rank = number if role == "server" else len(endpoints) + number
        return Alone(role, rank, by_hand.addresses(endpoints)[0], by_hand.token(self.token_file))

    def hints(self, processes: int) -> list[str]:
        servers, trainers = self.count(), self.count_trainers(processes)
        if servers <= trainers:
            return []
        return [f"{servers} servers for {trainers} trainer(s): more servers than trainers mostly wait; use fewer, unless the tables need the memory of all"]

    def check(self, task: Task, processes: int, devices: str) -> None:
        if find_spec("grpc") is None:
            raise ConfigError("strategy=pserver needs grpcio, which is not installed: python -m pip install 'dtf[pserver]'")
        if self.server_device is Device.cuda and devices == "cpu":
            raise ConfigError("strategy.server_device=cuda needs a GPU, and launcher.devices has none here; use strategy.server_device=cpu")
        trainers = self.count_trainers(processes)
        if self._rows_alone:
            self._check_rows_alone(task, trainers)
        if not self.trainers:
            check_divides("strategy.team", self.team, processes)
        alone = self.alone()
        if alone and self.team > 1:
            raise ConfigError(f"strategy.team={self.team} is started by a launcher; leave strategy.endpoints and DTF_ENDPOINTS out, or use strategy.team=1")
        if alone and self.tls.mode is TlsMode.none and not self.allow_insecure:
            by_hand.check_loopback(self.where())
        elif self.allow_insecure and not alone:
            raise ConfigError("strategy.allow_insecure=true is for strategy.endpoints; under a launcher all stays on this host, leave it out")
        self.tls.check(serves=not alone or alone.role == "server", asks=not alone or alone.rank > 0)
        by_hand.check_certificates("strategy.tls", self.tls.files())
        if not alone and self.token_file:
            raise ConfigError("strategy.token_file is for strategy.endpoints; a launcher draws a token by itself, leave it out")
        if not alone and self.meet_timeout_s is not None:
            raise ConfigError(f"strategy.meet_timeout_s={self.meet_timeout_s:g} is for strategy.endpoints; launchers have a time of their own, leave it out")
        if self.hogwild_threads > 1:
            self._check_hogwild(devices)
        check_placement(self.placement)
        if self.record.lower() in _SWITCHES:
            raise ConfigError(f"strategy.record={self.record} is no switch but names a folder in the run folder; use strategy.record=order, or leave it out")
        if self.record and (not _FOLDER.fullmatch(self.record) or self.record in _TAKEN):
            raise ConfigError(
                f"strategy.record={self.record} must name a folder of its own in the run folder: letters, digits, '_' and '-', not {' or '.join(_TAKEN)}; "
                "use strategy.record=order"
            )
        if not self.slice_parameters and self.min_block != 8192:
            raise ConfigError(f"strategy.min_block={self.min_block} is for slices, and strategy.slice_parameters=false cuts none; leave it at 8192")
        if 0 < self.rpc_threads <= 2 * trainers and not self._rows_alone:
            raise ConfigError(
                f"strategy.rpc_threads={self.rpc_threads}: each of {trainers} trainers may wait in two, for work and for state, and a push "
                "needs one more; use more, or 0"
            )
        several = self.count() > 1 and not self._rows_alone
        exact = self.mode is Mode.sync
        if self.gather and self.mode is not Mode.half_async:
            raise ConfigError(f"strategy.gather={self.gather} is for strategy.mode=half_async, this is {self.mode.value}; leave it at 0")
        if self.geo_steps is not None and self.mode is not Mode.geo:
            raise ConfigError(f"strategy.geo_steps={self.geo_steps} is for strategy.mode=geo, this is {self.mode.value}; leave it at null")
        if self.send_queue != 1 and self.mode in (Mode.sync, Mode.geo):
            raise ConfigError(f"strategy.send_queue={self.send_queue} is for modes async and half_async, this is {self.mode.value}; leave it at 1")
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
        if self.wire is not Wire.same and (self.mode is Mode.geo or task.precision.param is not Format.fp32):
            what = "strategy.mode=geo, which exchanges the optimizer's state" if self.mode is Mode.geo else f"precision.param={task.precision.param.value}"
            raise ConfigError(f"strategy.wire={self.wire.value} narrows gradients and parameters of fp32, not those of {what}; use strategy.wire=same")
        rows = task.rows if task.recipe.table_widths() else None
        for group, rule in {"optimizer": task.optimizer, "sparse": rows}.items() if self.mode is Mode.geo and self.staleness != 0 else ():
            if rule is not None and rule.averages_squares:
                raise KeyProblem(
                    group,
                    f"strategy.mode=geo adds up what trainers learnt from states of different age, and averages of squares, as {group}={name_of(group, rule)} "
                    f"keeps them, may become negative; set strategy.staleness=0, with which all exchange at once, or use {group}=sgd or adagrad",
                )
        if self.mode is Mode.geo and task.rows is not None and task.recipe.table_widths() and task.rows.shrinkage(1.0):
            raise ConfigError("strategy.mode=geo exchanges the rows that a trainer met, and sparse.weight_decay shrinks all others too; set it to 0")
        if several and self.slice_parameters and task.optimizer.by_tensor:
            raise ConfigError(f"{type(task.optimizer).__name__} looks at whole tensors, which strategy.slice_parameters=true cuts; set it to false")

    def _check_hogwild(self, devices: str) -> None:
        said = f"strategy.hogwild_threads={self.hogwild_threads}"
        if self.mode is Mode.sync:
            raise ConfigError(
                f"{said}: threads refresh the parameters while others compute, and with strategy.mode=sync all gradients of a step are of the same ones; "
                "use async or half_async, or more strategy.trainers"
            )
        if self.mode is Mode.geo:
            raise ConfigError(f"{said}: threads share their parameters, and with strategy.mode=geo each trainer learns by itself; use more strategy.trainers")
        if self.record:
            raise ConfigError(
                f"{said}: threads compute with parameters of which some are newer than others, and nothing records which, so that strategy.record cannot "
                "be replayed; leave one of them out"
            )
        if self.team > 1:
            raise ConfigError(f"{said}: threads are trainers, and with strategy.team={self.team} a trainer is several processes; leave one of them at 1")
        if devices != "cpu":
            raise ConfigError(f"{said} is for trainers on CPU: on a GPU the passes of threads follow each other; use more strategy.trainers")

    def _check_rows_alone(self, task: Task, trainers: int) -> None:
        said, plain = "strategy.dense=allreduce", Pserver()
        if not task.recipe.table_widths():
            because, name = task.recipe.idle().get("sparse"), name_of("recipe", task.recipe)
            none = f"this recipe has none as {because} is set; use {because}=sparse" if because else f"{name} has none; use recipe=ctr_clicks_sparse"
            raise ConfigError(f"{said} leaves sparse tables to servers, and {none}, or strategy=ddp")
        if self.mode is not Mode.sync:
            raise ConfigError(f"{said} makes one update of all gradients, which is strategy.mode=sync, this is {self.mode.value}; use sync, or dense=pserver")
        if self.where():
            raise ConfigError(f"{said} is started by a launcher; leave strategy.endpoints and DTF_ENDPOINTS out, or use dense=pserver")
        if 0 < self.rpc_threads <= trainers:
            raise ConfigError(f"strategy.rpc_threads={self.rpc_threads}: with {said} each of {trainers} trainers waits in one; use more, or 0")
        used = {"mode", "dense", "servers", "trainers", "tls", "rpc_threads"}
        for key in (field.name for field in fields(self) if field.name not in used):
            if getattr(self, key) != getattr(plain, key):
                raise ConfigError(f"strategy.{key} is of no account with {said}; leave it out")

    def communication(self, devices: str) -> str | None:
        return "nccl" if self._rows_alone and devices == "cuda" else "gloo"

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
                return Geo(self.staleness, self.geo_steps or GEO_STEPS)

    def meet(self, standing: Standing) -> Standing:
        from dtf.pserver.session import meet

        standing, self._post = meet(standing, self, self.count_trainers(standing.place.slots))
        return standing

    def setup(self, task: Task, world: World) -> Program:
        if self._rows_alone:
            return self._replica(task, world)
        from dtf.pserver.session import Post, serve

        return serve(task, world, self, self.count_trainers(world.slots), self._post or Post())

    def _replica(self, task: Task, world: World) -> Program:
        """ddp's program, with rows elsewhere."""
        from dtf.build import cast_model, draw_model
        from dtf.pserver.remote import Assisted, RemoteTables
        from dtf.pserver.session import servers
        from dtf.reducing import on_their_way, reduced
        from dtf.spmd import Replica, workload
        from dtf.update import LocalUpdate, whole

        model = draw_model(task.recipe, task.seed, task.weights)
        masters = cast_model(model, task.precision, world.device)
        several = world.size > 1
        forward, exchange = (reduced(model), on_their_way(model, workload(task, world.size)[0])) if several else (None, 0)
        tables = RemoteTables(task, world, 1 / world.size, lambda: servers(world.place, self))
        options = task.optimizer, task.step.clip_norm, task.precision.loss_scale
        update = LocalUpdate(whole(model, masters), *options, writes=world.rank == 0, tables=tables)
        return Assisted(Replica(model, task, world.device, forward), update, task, world, exchange=exchange, tables=tables)

    def assist(self, task: Task, errand: Errand) -> None:
        if self._rows_alone:
            from dtf.checkpoint import Stored, write_boxes
            from dtf.pserver.session import lend

            lend(task, errand, self, self.count_trainers(errand.place.slots), Stored, write_boxes)
        else:
            from dtf.pserver.session import train

            train(task, errand, self, self.count_trainers(errand.place.slots))

    def count_trainers(self, processes: int) -> int:
        """As servers count them, for `launcher.processes`: each team, or each thread of a process."""
        return (self.trainers or max(1, processes // self.team)) * self.hogwild_threads
