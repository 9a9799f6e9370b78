"""Parameter servers: some processes hold the state, others compute on what they pull and push gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dtf.api.registry import register
from dtf.api.strategy import Program, RendezvousContext, RoleContext, Strategy, check_divides
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.pserver.checks import check
from dtf.pserver.options import Device, PserverOptions

if TYPE_CHECKING:
    from dtf.distributed.world import World
    from dtf.pserver.manual_rendezvous import ServerBootstrap


@register("strategy", "pserver")
class Pserver(PserverOptions, Strategy):
    """Servers hold parameters and tables, each a part, and run the engine; trainers pull what a batch needs, compute,
    and push gradients.

    Bytes per step and trainer: twice the parameters, and 2 x U x (8 + width x format) for U distinct ids of its rows.
    """

    def __post_init__(self) -> None:
        # of a server, from `rendezvous` on; no field, which would be a config key
        self._bootstrap: ServerBootstrap | None = None

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

    def computes_on_device(self, role: str) -> bool:
        return role == "trainer" or self.server_device is Device.cuda

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

    def rendezvous(self, context: RendezvousContext) -> RendezvousContext:
        from dtf.pserver.manual_rendezvous import rendezvous

        context, self._bootstrap = rendezvous(context, self, self.count_trainers(context.place.slots))
        return context

    def setup(self, task: Task, world: World) -> Program:
        if self.rows_alone:
            return self._replica(task, world)
        from dtf.pserver.bootstrap import serve
        from dtf.pserver.manual_rendezvous import ServerBootstrap

        return serve(task, world, self, self.count_trainers(world.slots), self._bootstrap or ServerBootstrap())

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
        tables = RemoteTables(task, world, 1 / world.size, lambda: connect_servers(world.place, self))
        sharding = Sharding(params=full_params(model, masters), writes=world.rank == 0, tables=tables)
        replica = Replica(model, task, world.device, forward)
        return RemoteTablesProgram(replica, sharding, task, world, exchange=exchange)

    def run_helper(self, task: Task, context: RoleContext) -> None:
        if self.rows_alone:
            from dtf.checkpoint.boxes import StoredCheckpoint, write_boxes
            from dtf.pserver.bootstrap import serve_rows

            serve_rows(task, context, self, self.count_trainers(context.place.slots), StoredCheckpoint, write_boxes)
        else:
            from dtf.pserver.bootstrap import train

            train(task, context, self, self.count_trainers(context.place.slots))
