"""Ranks on several hosts that are known beforehand: one launching process on each, started with the same command line
but for `launcher.node_rank`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.launcher import LONGEST_S, WORK, report
from dtf.api.registry import option, register
from dtf.core.consistency import shared_keys
from dtf.core.errors import ConfigError, DtfError, Preempted
from dtf.core.types import Event, Failed
from dtf.host import network
from dtf.host.signals import Stop
from dtf.launch.exit_cause import Outcome
from dtf.launch.host_rendezvous import Hosts
from dtf.launch.restart_policy import supervise
from dtf.launch.supervised import Watched
from dtf.launch.worker_group import Attempt

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun
    from dtf.runs.run_folder import Run


@register("launcher", "static")
class Static(Watched):
    """Start this host's ranks of a run on `nodes` hosts; watched on each, restarted together, by processes that meet at
    `address`.
    """

    nodes: int = option(least=1, most=1024, doc="hosts that take part")
    node_rank: int = option(least=0, doc="which of them this is, 0 to nodes - 1; 0 makes the run folder and reports")
    address: str = option(
        doc="HOST:PORT on host 0, reachable from all the others; with an IPv6 address '\"[ADDRESS]:PORT\"'"
    )
    meet_timeout_s: float = option(
        default=600.0,
        above=0,
        most=LONGEST_S,
        doc="time for all hosts to come to the address, at first and after one was lost",
        unit="s",
    )

    @property
    def node(self) -> int:
        return self.node_rank

    @property
    def hosts(self) -> int:
        return self.nodes

    def count(self) -> int:
        network.endpoint(self.address, "launcher.address")
        if self.node_rank >= self.nodes:
            raise ConfigError(
                f"launcher.node_rank={self.node_rank} must be less than launcher.nodes={self.nodes}; hosts are "
                "counted from 0"
            )
        return super().count()

    def meeting_point(self) -> tuple[str, int, bool]:
        return *network.endpoint(self.address, "launcher.address"), self.node_rank == 0

    def open(self, config: dict[str, Any], make: Callable[[str], Run], command: Sequence[str] = ()) -> Run:
        """Meet the other hosts; collective. Host 0 makes the run for all.

        ConfigError names the host that differs and in what.
        """
        from dtf.config.settings import parse_settings
        from dtf.runs.run_folder import Run, versions

        host, port = network.endpoint(self.address, "launcher.address")
        ranks = self.count() // self.nodes
        world = {"launcher.nodes": self.nodes, "launcher.processes": ranks, "devices": self.devices_kind()}
        task = {"config": shared_keys(config), "versions": versions(), **world}
        self._hosts = Hosts(
            self.node_rank, self.nodes, ranks, (host, port), self.hang_timeout_s, _say, os.environ.get("DTF_TOKEN", "")
        )
        try:
            if self.node_rank == 0:
                made: list[Run] = []

                def answer() -> dict[str, Any]:
                    made.append(make(""))
                    return {"folder": str(made[0].folder), "id": made[0].id}

                self._hosts.lead(task, self.meet_timeout_s, answer)
                return made[0]
            told = self._hosts.follow(task, self.meet_timeout_s)
            folder = Path(str(told["folder"]))
            if not folder.is_dir():
                error = ConfigError(
                    f"host {self.node_rank} ({socket.gethostname()}) does not see the run folder {folder}; put "
                    "run.dir on storage that all hosts share"
                )
                self._hosts.settle(self._failure(error))
                raise error
            _say(f"host {self.node_rank} of {self.nodes} takes part in {folder}; host 0 reports")
            return Run(folder, str(told["id"]), config, parse_settings(config), leader=False)
        except BaseException:
            self._hosts.close()
            raise

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        with Stop() as stop:
            try:
                outcome = self._follow(run, see, entry, stop) if self.node_rank else self._lead(run, see, entry, stop)
            finally:
                self._hosts.close()
        if outcome.cause:
            see(outcome.cause)
            report(outcome.cause)
        return outcome.exit

    def _lead(self, run: LaunchedRun, see: Callable[[Event], None], entry: str, stop: Stop) -> Outcome:
        """Host 0: decides about attempts, as launcher=local does."""
        host = network.endpoint(self.address, "launcher.address")[0]

        def attempt(number: int) -> Attempt:
            self._hosts.complete(self.meet_timeout_s, lambda: stop.count > 0)
            listener = network.listen(host, 0)
            store = f"{host}:{listener.getsockname()[1]}"
            return self.attempt(run, entry, number, self._sockets(), stop, see, store, listener, self._hosts)

        outcome = None
        try:
            outcome = supervise(attempt, self.max_restarts, lambda: stop.count > 0, see)
            return outcome
        except DtfError as error:
            outcome = self._failure(error)
            raise
        finally:
            if outcome:  # else a bug ends this process, and the others hear that it is gone
                self._hosts.tell({"end": outcome.to_json()})

    def _follow(self, run: LaunchedRun, see: Callable[[Event], None], entry: str, stop: Stop) -> Outcome:
        """Other hosts: do what host 0 says, until it says how the run ended."""
        while True:
            said = self._hosts.next(lambda: stop.count < 2)
            if "end" in said:
                return Outcome.from_json(said["end"])
            if stop.count:
                raise Preempted(
                    "asked to stop between two attempts; start again with the same run.dir to go on from the last "
                    "checkpoint"
                )
            try:
                self.attempt(
                    run, entry, int(said["begin"]), self._sockets(), stop, see, str(said["store"]), None, self._hosts
                ).run()
            except DtfError as error:
                self._hosts.settle(self._failure(error))
                raise

    def _failure(self, error: DtfError) -> Outcome:
        """An error of this launching process, for the other hosts; its first rank stands for it."""
        return Outcome(
            error.exit, Failed(self.node_rank * (self.count() // self.nodes), 0, int(error.exit), str(error), "")
        )

    def _sockets(self) -> dict[str, str]:
        return network.socket_variables(self.interface, network.endpoint(self.address, "launcher.address"), os.environ)


def _say(text: str) -> None:
    """Hosts other than 0 have no observers, and host 0 none before the run folder is made."""
    print(f"dtf: {text}", file=sys.stderr, flush=True)
