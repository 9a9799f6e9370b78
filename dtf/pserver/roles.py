"""The two roles of a parameter server, servers and trainers: who starts, who is replaced, what the helpers run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.helper_roles import HelperRoles, RendezvousContext, RoleContext
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.pserver.options import Device

if TYPE_CHECKING:
    from dtf.pserver.manual_rendezvous import ServerBootstrap
    from dtf.pserver.options import PserverOptions


class PserverRoles(HelperRoles):
    """Servers run the engine and trainers help them; with `dense=allreduce` it is the other way round."""

    def __init__(self, options: PserverOptions) -> None:
        self._options = options
        self.bootstrap: ServerBootstrap | None = None
        """What a server has from `rendezvous` on."""

    @property
    def replaceable(self) -> frozenset[str]:
        return frozenset() if self._options.rows_alone else frozenset({"trainer"})

    def on_device(self, role: str) -> bool:
        return role == "trainer" or self._options.server_device is Device.cuda

    def count_key(self, role: str) -> str:
        return "strategy.servers" if role == "server" else super().count_key(role)

    def check_manual_start(self) -> None:
        option = (
            "strategy.dense=allreduce"
            if self._options.rows_alone
            else f"strategy.team={self._options.team}"
            if self._options.team > 1
            else ""
        )
        if option:
            raise ConfigError(
                f"{option}: these processes find each other by a launcher that starts them all, and launcher=manual "
                "starts one; use launcher=local, or leave it out"
            )

    def rendezvous(self, context: RendezvousContext) -> RendezvousContext:
        from dtf.pserver.manual_rendezvous import rendezvous

        context, self.bootstrap = rendezvous(context, self._trainers(context))
        return context

    def run(self, task: Task, context: RoleContext) -> None:
        if self._options.rows_alone:
            from dtf.checkpoint.boxes import StoredCheckpoint, write_rank
            from dtf.pserver.bootstrap import serve_rows

            serve_rows(task, context, self._options, self._trainers(context), StoredCheckpoint, write_rank)
        else:
            from dtf.pserver.bootstrap import train

            train(task, context, self._options, self._trainers(context))

    def _trainers(self, context: RendezvousContext | RoleContext) -> int:
        """How many there are in all, as servers count them."""
        return self._options.count_trainers(context.place.slots)
