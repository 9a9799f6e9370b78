"""Parameter servers: some processes hold the state, others compute on what they pull and push gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dtf.api.registry import register
from dtf.api.schema import KeyProblem
from dtf.api.strategy import Program, Strategy, check_divides
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.host import devices
from dtf.pserver.checks import check
from dtf.pserver.host_layout import host_layout
from dtf.pserver.options import PserverOptions, Trainers
from dtf.pserver.roles import PserverRoles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtf.api.options import Compile
    from dtf.distributed.world import World


@register("strategy", "pserver")
class Pserver(PserverOptions, Strategy):
    """Servers hold parameters and tables, each a part, and run the engine; trainers pull what a batch needs, compute,
    and push gradients.

    Bytes per step and trainer: twice the parameters, and 2 x U x (8 + width x format) for U distinct ids of its rows.
    """

    def __post_init__(self) -> None:
        self.helper_roles = PserverRoles(self)

    def roles(self, processes: int) -> dict[str, int]:
        roles = {"server": self.servers, "trainer": processes}
        return dict(reversed(roles.items())) if self.rows_alone else roles

    def from_host(self, launcher: Mapping[str, Any], is_set: Callable[[str], bool]) -> dict[str, Any]:
        if self.trainers is Trainers.given:
            return {}
        if launcher["name"] != "local":
            raise KeyProblem(
                "strategy.trainers",
                f"strategy.trainers=auto lays out what launcher=local starts on one host, and this is "
                f"launcher={launcher['name']}; use strategy.trainers=given",
            )
        cores, chosen = devices.cores(), devices.choose(launcher["devices"])
        layout = host_layout(self.mode, cores, self.hogwild_threads, self.team, launcher["threads"] or 1)
        processes = devices.processes("auto", chosen) if chosen.kind == "cuda" else layout.trainers
        processes = processes if launcher["processes"] == "auto" else launcher["processes"]
        return {
            "launcher.processes": processes,
            "strategy.servers": self.servers if is_set("strategy.servers") else layout.servers,
        }

    def check(self, task: Task, processes: int, devices: str) -> None:
        if find_spec("grpc") is None:
            raise ConfigError(
                "strategy=pserver needs grpcio, which is not installed: python -m pip install 'dtf[pserver]'"
            )
        check_divides("strategy.team", self.team, processes)
        check(self, task, devices)

    def unguarded(self, processes: int) -> str:
        return "servers hold each parameter once, and trainers copy it in each step; use strategy=ddp"

    def uncompiled(self, kind: Compile, processes: int) -> str:
        return ""

    def communication(self, devices: str) -> str | None:
        return "nccl" if self.rows_alone and devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        if self.rows_alone:
            return self._replica(task, world)
        from dtf.pserver.bootstrap import serve
        from dtf.pserver.manual_rendezvous import ServerBootstrap

        assert isinstance(self.helper_roles, PserverRoles)
        bootstrap = self.helper_roles.bootstrap or ServerBootstrap()
        return serve(task, world, self, self.count_trainers(world.slots), bootstrap)

    def _replica(self, task: Task, world: World) -> Program:
        """ddp's program, with rows elsewhere."""
        from dtf.model.init import cast, model_of
        from dtf.optim.sharding import Sharding, full_params
        from dtf.pserver.connections import connect_servers
        from dtf.pserver.trainer.remote_tables import RemoteTables, RemoteTablesProgram
        from dtf.strategies.ddp import inflight_bytes, wrap_ddp
        from dtf.strategies.replica import Replica
        from dtf.strategies.spmd import microbatch_load

        model = model_of(task)
        masters = cast(model, task.precision, world.device)
        several = world.size > 1
        forward, exchange = (
            (wrap_ddp(model), inflight_bytes(model, microbatch_load(task, world.size)[0])) if several else (None, 0)
        )
        tables = RemoteTables(task, world, 1 / world.size, lambda: connect_servers(world.place, self.servers))
        sharding = Sharding(params=full_params(model, masters), writes=world.rank == 0, tables=tables)
        replica = Replica(model, task, world.device, forward)
        layout = self.layout_text(world.size)
        return RemoteTablesProgram(replica, sharding, task, world, exchange, layout)
