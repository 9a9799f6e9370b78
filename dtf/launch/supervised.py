"""What launchers share whose launching process forks ranks on its host, watches and restarts them, and never imports
torch.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtf.api.helper_roles import HelperRoles
from dtf.api.launcher import Launcher, check_environment, log_folder, report
from dtf.api.registry import name_of, registered
from dtf.core.errors import ConfigError
from dtf.core.types import Event, Place
from dtf.host import devices, network
from dtf.host.core_reservation import reserve_cores
from dtf.host.deadline import deadline
from dtf.host.devices import MOST_PROCESSES
from dtf.host.signals import Stop
from dtf.launch import manual_checks
from dtf.launch.forkserver_cache import files, fork_server
from dtf.launch.one_run import one_run
from dtf.launch.rank_handle import Limits, OtherHosts
from dtf.launch.rank_options import RankOptions
from dtf.launch.recovery import RecoveryReport
from dtf.launch.restart_policy import run_with_restarts
from dtf.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy

_uses_fork_server = threading.Lock()
"""Two runs at a time would take each other's ranks for their own."""


@dataclass(kw_only=True)
class SupervisedLauncher(RankOptions, Launcher):
    """The worker group of an attempt, by these options. This is host `node` of `hosts`."""

    @property
    def node(self) -> int:
        return 0

    @property
    def hosts(self) -> int:
        return 1

    def devices_kind(self) -> str:
        return self.chosen_devices().kind

    def count(self) -> int:
        self.check_host()
        return self.hosts * devices.processes(self.processes, self.chosen_devices())

    def chosen_devices(self) -> devices.Devices:
        """The devices of this host, in the order in which its ranks of a role get one each. ConfigError for those that
        are not there.
        """
        return devices.choose(self.devices)

    def check_host(self) -> None:
        """Raise ConfigError where this host cannot start ranks with these options."""
        check_environment(self.env)
        network.check_interface(self.interface)
        if sys.platform != "linux":
            raise ConfigError(f"ranks are forked on Linux only, this is {sys.platform}; use launcher=inline")

    def check(self, strategy: Strategy) -> None:
        engine_role, *others = roles = strategy.roles(self.count())
        if others:
            if type(strategy.helper_roles).run is HelperRoles.run:
                raise ConfigError(
                    f"strategy={name_of('strategy', strategy)} has processes of the role {others[0]} beside "
                    f"{engine_role}, and nothing says what they do; give it `helper_roles`, a dtf.HelperRoles with run"
                )
            manual_checks.refuse_environment(roles)
        self._places(strategy)

    def supervise(self, run: LaunchedRun, see: Callable[[Event], None], entry: str, sockets: dict[str, str]) -> int:
        """Run the ranks of this host, which need no other host, to their end; see `Launcher.launch`.

        `sockets`: environment variables that name the network interface.
        """
        recovery = RecoveryReport(see)
        with one_run(_uses_fork_server, "start this one in a process of its own"), Stop() as stop:

            def start(attempt: int) -> WorkerGroup:
                return recovery.begin(self.worker_group(run, entry, attempt, sockets, stop, recovery.see))

            result = run_with_restarts(start, self.max_restarts, lambda: stop.count > 0, see)
        if result.cause:
            see(result.cause)
            report(result.cause)
        return result.exit

    def worker_group(
        self,
        run: LaunchedRun,
        entry: str,
        attempt: int,
        sockets: dict[str, str],
        stop: Stop,
        see: Callable[[Event], None],
        store: str = "",
        listener: socket.socket | None = None,
        others: OtherHosts | None = None,
    ) -> WorkerGroup:
        """The ranks of this host for one attempt, not yet started.

        `sockets`: environment variables that name the network interface. `store`, `listener`: see `WorkerGroup`.
        """
        strategy = run.strategy
        places, pins = self._places(strategy)
        if self.pin:
            reserve_cores(core for pin in pins for core in pin)
        order = {
            "entry": entry,
            "config": run.config,
            "folder": str(run.folder),
            "run_id": run.id,
            "environment": {**os.environ, **sockets, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **self.env},
            "directory": os.getcwd(),
            "path": [os.path.abspath(part) for part in sys.path],
        }
        limits = Limits(self.hang_timeout_s, self.start_timeout_s, self.grace_s)
        several_roles = len({place["role"] for place in places}) > 1
        shared = {"attempt": attempt, "prefix": f"{run.id}/{attempt}", "token": run.token if several_roles else ""}
        shared["deadline"] = deadline(os.environ)
        shared |= {name: getattr(self, name) for name in ("hang_timeout_s", "start_timeout_s", "grace_s")}
        logs = log_folder(self.log_dir, run.folder)
        server = fork_server(self.env)
        if package := _package_of(run.config.get("recipe", {}).get("name", "")):
            server.import_package(package)
        return WorkerGroup(
            server,
            order,
            [Place(**{**shared, **place}) for place in places],
            pins,
            logs,
            limits,
            stop,
            see,
            store,
            listener,
            others,
            strategy.helper_roles.replaceable if several_roles else frozenset(),
            self.max_restarts,
        )

    def _places(self, strategy: Strategy) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """The fields of each rank's `Place` on this host, but for those of an attempt; and the cores of each.

        ConfigError where these processes cannot run here.
        """
        slots, chosen = self.count(), self.chosen_devices()
        roles = [role for role, number in strategy.roles(slots).items() for _ in range(number)]
        self._check_hosts(roles)
        self._check_files(slots, len(roles))
        local_size = len(roles) // self.hosts
        local_slots = slots // self.hosts
        names = [devices.device_of(slot, local_slots, chosen) for slot in range(local_slots)]
        first = self.node * local_size
        local_roles = roles[first : first + local_size]
        places = [
            {
                "rank": first + local,
                "size": len(roles),
                "local_rank": local,
                "local_size": local_size,
                "role": role,
                "slots": slots,
                "number": first + local - roles.index(role),
                "threads": self._threads(role, local_roles),
                "device": self._device(strategy, local, local_roles, chosen),
                "devices": names,
            }
            for local, role in enumerate(local_roles)
        ]
        self._check_binding(local_size)
        cores = devices.divided_cores(local_size) if self.pin else [sorted(os.sched_getaffinity(0))] * local_size
        return places, cores

    def _check_hosts(self, roles: list[str]) -> None:
        """Raise ConfigError when ranks of these roles do not divide among the hosts."""
        if len(set(roles)) > 1 and self.hosts > 1:
            raise ConfigError(
                f"launcher.nodes={self.hosts}: {' and '.join(dict.fromkeys(roles))} processes of this strategy start "
                "on one host; use 1"
            )
        if len(roles) % self.hosts:
            raise ConfigError(
                f"this strategy has {len(roles)} process(es), which do not divide among launcher.nodes={self.hosts} "
                "hosts; use another strategy"
            )

    def _check_binding(self, ranks: int) -> None:
        """Raise ConfigError when OpenMP would bind threads, which it does in all ranks alike: they are forks of one
        process, which has chosen.
        """
        environment = {**os.environ, **self.env}
        bind = environment.get("OMP_PROC_BIND", "")
        causes = ("OMP_PROC_BIND",) if bind else ("GOMP_CPU_AFFINITY", "OMP_PLACES")
        name = next((name for name in causes if environment.get(name)), "")
        if ranks > 1 and name and bind.lower() != "false":
            raise ConfigError(
                f"{name}={environment[name]} binds the threads of all {ranks} ranks to the same cores; undo it with "
                "'launcher.env.OMP_PROC_BIND=\"false\"'; launcher.pin=true gives ranks cores of their own"
            )

    def _check_files(self, slots: int, size: int) -> None:
        """Raise ConfigError when this host allows too few open files."""
        allowed = devices.allow_files(files(MOST_PROCESSES))
        if allowed < files(size):
            raise ConfigError(
                f"launcher.processes={slots} needs {files(size)} open files in one process, this shell allows "
                f"{allowed}; see ulimit -n"
            )

    def _threads(self, role: str, local_roles: list[str]) -> int:
        """Intra-op threads of a rank of this role. `local_roles`: of all ranks of this host.

        Trainers divide the cores among themselves: other roles mostly work while trainers wait.
        """
        sharers = local_roles.count("trainer") if role == "trainer" and not self.pin else len(local_roles)
        return self.threads or max(1, devices.cores() // sharers)

    def _device(self, strategy: Strategy, local: int, local_roles: list[str], chosen: devices.Devices) -> str:
        """The device of the host's rank `local`. Each role gets the devices from the first on."""
        role = local_roles[local]
        if not strategy.helper_roles.on_device(role):
            return "cpu"
        key = strategy.helper_roles.count_key(role)
        return devices.device_of(local_roles[:local].count(role), local_roles.count(role), chosen, key)


def _package_of(recipe: str) -> str:
    """The package of one of dtf's own recipes, whose modules bring libraries of their own; empty for another's."""
    parts = registered("recipe")[recipe].__module__.split(".") if recipe in registered("recipe") else []
    return ".".join(parts[:3]) if parts[:2] == ["dtf", "recipes"] else ""
