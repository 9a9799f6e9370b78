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
from dtf.core.own_code import CODE, own_code
from dtf.core.types import Event, Failed
from dtf.host import network
from dtf.host.signals import Stop
from dtf.launch.exit_cause import GroupResult
from dtf.launch.host_rendezvous import HostRendezvous
from dtf.launch.recovery import RecoveryReport
from dtf.launch.restart_policy import run_with_restarts
from dtf.launch.supervised import SupervisedLauncher
from dtf.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun
    from dtf.runs.run_folder import Run


@register("launcher", "static")
class Static(SupervisedLauncher):
    """Start this host's ranks of a run on `nodes` hosts.

    One process on each host watches its ranks; all are restarted together. These processes meet at `address`.
    """

    hears_all = False

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
        task = {"config": shared_keys(config), "versions": versions(), CODE: own_code(), **world}
        self._hosts = HostRendezvous(
            self.node_rank, self.nodes, ranks, (host, port), self.hang_timeout_s, _say, os.environ.get("DTF_TOKEN", "")
        )
        try:
            if self.node_rank == 0:
                made: list[Run] = []

                def answer() -> dict[str, Any]:
                    made.append(make(""))
                    return {"folder": str(made[0].folder), "id": made[0].id}

                self._hosts.join_as_leader(task, self.meet_timeout_s, answer)
                return made[0]
            leaders = self._hosts.join_as_follower(task, self.meet_timeout_s)
            folder = Path(str(leaders["folder"]))
            if not folder.is_dir():
                error = ConfigError(
                    f"host {self.node_rank} ({socket.gethostname()}) does not see the run folder {folder}; put "
                    "run.dir on storage that all hosts share"
                )
                self._hosts.report_result(self._failure(error))
                raise error
            _say(f"host {self.node_rank} of {self.nodes} takes part in {folder}; host 0 reports")
            return Run(folder, str(leaders["id"]), config, parse_settings(config), leader=False)
        except BaseException:
            self._hosts.close()
            raise

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        with Stop() as stop:
            self._hosts.stop = stop
            try:
                result = self._follow(run, see, entry, stop) if self.node_rank else self._lead(run, see, entry, stop)
            finally:
                self._hosts.close()
        if result.cause:
            see(result.cause)
            report(result.cause)
        return result.exit

    def _lead(self, run: LaunchedRun, see: Callable[[Event], None], entry: str, stop: Stop) -> GroupResult:
        """Host 0: decides about attempts, as launcher=local does."""
        host, recovery = network.endpoint(self.address, "launcher.address")[0], RecoveryReport(see)

        def start(attempt: int) -> WorkerGroup:
            self._hosts.wait_for_hosts(self.meet_timeout_s, lambda: stop.count > 0)
            listener = network.listen(host, 0)
            store = f"{host}:{listener.getsockname()[1]}"
            return recovery.begin(
                self.worker_group(
                    run, entry, attempt, self._sockets(), stop, recovery.see, store, listener, self._hosts
                )
            )

        result = None
        try:
            result = run_with_restarts(start, self.max_restarts, lambda: stop.count > 0, see)
            return result
        except DtfError as error:
            result = self._failure(error)
            raise
        finally:
            if result:  # else a bug ends this process, and the others find its connection closed
                self._hosts.broadcast({"end": result.to_json()})

    def _follow(self, run: LaunchedRun, see: Callable[[Event], None], entry: str, stop: Stop) -> GroupResult:
        """Other hosts: begin each attempt that host 0 begins, until it says how the run ended."""
        while True:
            message = self._hosts.next_message(lambda: stop.count < 2)
            if "end" in message:
                return GroupResult.from_json(message["end"])
            if stop.count:
                raise Preempted(
                    "asked to stop between two attempts; start again with the same run.dir to go on from the last "
                    "checkpoint"
                )
            try:
                attempt, store = int(message["begin"]), str(message["store"])
                self.worker_group(run, entry, attempt, self._sockets(), stop, see, store, None, self._hosts).run()
            except DtfError as error:
                self._hosts.report_result(self._failure(error))
                raise

    def _failure(self, error: DtfError) -> GroupResult:
        """An error of this launching process as the other hosts get it: as if its first rank had failed."""
        return GroupResult(
            error.exit, Failed(self.node_rank * (self.count() // self.nodes), 0, int(error.exit), str(error), "")
        )

    def _sockets(self) -> dict[str, str]:
        return network.socket_variables(self.interface, network.endpoint(self.address, "launcher.address"), os.environ)


def _say(text: str) -> None:
    """Hosts other than 0 have no observers, and host 0 none before the run folder is made."""
    print(f"dtf: {text}", file=sys.stderr, flush=True)
