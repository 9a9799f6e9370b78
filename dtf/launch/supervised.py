"""What launchers share whose ranks are forked on this host, watched and restarted by the launching process, which never
imports torch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dtf.api.launcher import LONGEST_S, Launcher, check_environment, log_folder
from dtf.api.registry import option
from dtf.core.errors import ConfigError
from dtf.core.types import Event, Place
from dtf.host import devices, network
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS
from dtf.host.signals import Stop
from dtf.launch.forkserver_cache import files, warm
from dtf.launch.restart_policy import NO_PROGRESS
from dtf.launch.worker_group import Attempt, Limits, Others

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy


@dataclass(kw_only=True)
class Watched(Launcher):
    """Options of such a launcher, and one attempt with them. `node` and `nodes` say which of how many hosts this is."""

    processes: int | Literal["auto"] = option(
        default="auto",
        least=1,
        most=MOST_PROCESSES,
        doc="how far to spread on each host; `auto`: one process per GPU, without GPUs 2",
    )
    devices: str = option(
        default="auto",
        doc="`auto`: GPUs if there are any; `cpu`; `cuda`; or numbers of GPUs, as in launcher.devices='\"0,2\"'",
    )
    threads: int = option(
        default=0,
        least=0,
        most=MOST_THREADS,
        doc="intra-op threads of each rank; 0: cores divided by the trainers of this host",
    )
    pin: bool = option(default=False, doc="give each rank cores of its own")
    env: dict[str, str] = option(
        factory=dict,
        doc="environment variables for ranks, beside those of this process: switches of NCCL, gloo, OpenMP",
    )
    interface: str = option(
        default="",
        doc="network interface of gloo and nccl; empty: loopback on one host; on several gloo takes the one towards "
        "host 0, nccl chooses",
    )
    log_dir: str = option(
        default="", doc="where the ranks' logs go, in a folder named as the run folder; empty: the run folder itself"
    )
    max_restarts: int = option(
        default=NO_PROGRESS,
        least=0,
        most=NO_PROGRESS,  # as many without a new checkpoint end a run anyway
        doc="restarts after a lost rank; counts again from 0 after a new checkpoint, where one rank alone is "
        "restarted after its next step",
    )
    hang_timeout_s: float = option(
        default=60.0,
        above=0,
        most=LONGEST_S,
        doc="silence of a rank within a step, or of a host, that means it hangs; in any phase the time a rank may be "
        "stopped by a signal",
        unit="s",
    )
    start_timeout_s: float = option(
        default=600.0,
        above=0,
        most=LONGEST_S,
        doc="the same while starting, the first step included, evaluating and saving",
        unit="s",
    )
    grace_s: float = option(
        default=25.0,
        least=0,
        most=LONGEST_S,
        doc="time to save after SIGTERM or SIGINT before ranks are killed",
        unit="s",
    )

    @property
    def node(self) -> int:
        return 0

    @property
    def hosts(self) -> int:
        return 1

    def devices_kind(self) -> str:
        return devices.choose(self.devices).kind

    def count(self) -> int:
        check_environment(self.env)
        network.check_interface(self.interface)
        if sys.platform != "linux":
            raise ConfigError(f"ranks are forked on Linux only, this is {sys.platform}; use launcher=inline")
        return self.hosts * devices.processes(self.processes, devices.choose(self.devices))

    def check(self, strategy: Strategy) -> None:
        if self.processes != "auto":
            strategy.check_processes(self.processes)
        self._places(strategy)

    def attempt(
        self,
        run: LaunchedRun,
        entry: str,
        number: int,
        sockets: dict[str, str],
        stop: Stop,
        see: Callable[[Event], None],
        store: str = "",
        listener: socket.socket | None = None,
        others: Others | None = None,
    ) -> Attempt:
        """The ranks of this host, about to start for the time `number`. `sockets`: variables that tell the interface.

        `store`: see `Attempt`.
        """
        strategy = run.strategy
        places, pins = self._places(strategy)
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
        alone = strategy.external_process()
        token = alone.token if alone else run.token if len({place["role"] for place in places}) > 1 else ""
        shared = {"attempt": number, "prefix": f"{run.id}/{number}", "token": token}
        shared |= {"hang_timeout_s": self.hang_timeout_s, "start_timeout_s": self.start_timeout_s}
        here = [Place(**{**place, **shared}) for place in places]
        logs, again, replaceable = (
            log_folder(self.log_dir, run.folder),
            self.max_restarts,
            frozenset() if alone else strategy.replaceable,
        )
        return Attempt(
            warm(self.env), order, here, pins, logs, limits, stop, see, store, listener, others, replaceable, again
        )

    def _places(self, strategy: Strategy) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Where each rank of this host stands, but for what an attempt adds; and the cores it is pinned to, none when
        it is not.
        """
        slots, chosen = self.count(), devices.choose(self.devices)
        roles = [role for role, number in strategy.roles(slots).items() for _ in range(number)]
        alone = strategy.external_process()
        if alone and self.hosts > 1:
            raise ConfigError(
                f"launcher.nodes={self.hosts}: with strategy.endpoints each command starts one process; use "
                "launcher=local"
            )
        if alone:
            device = devices.device_of(0, 1, chosen) if strategy.computes_on_device(alone.role) else "cpu"
            place = {
                "rank": alone.rank,
                "size": len(roles),
                "role": alone.role,
                "number": alone.rank - roles.index(alone.role),
                "slots": slots,
                "device": device,
                "devices": (device,),
            }
            return [place | {"threads": self.threads or devices.cores()}], [[]]
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
        size, local_size, cores = len(roles), len(roles) // self.hosts, sorted(os.sched_getaffinity(0))
        if self.pin and len(cores) < local_size:
            raise ConfigError(
                f"launcher.pin=true needs a core for each of {local_size} ranks, there are {len(cores)}; use "
                "launcher.pin=false"
            )
        allowed = devices.allow_files(files(MOST_PROCESSES))
        if allowed < files(size):
            raise ConfigError(
                f"launcher.processes={slots} needs {files(size)} open files in one process, this shell allows "
                f"{allowed}; see ulimit -n"
            )
        here = slots // self.hosts
        names = [devices.device_of(slot, here, chosen) for slot in range(here)]
        first = self.node * local_size
        kin = roles[first : first + local_size]
        places = [
            {
                "rank": first + local,
                "size": size,
                "local_rank": local,
                "local_size": local_size,
                "role": role,
                "slots": slots,
            }
            | {"number": first + local - roles.index(role)}
            | {
                "threads": self._threads(role, kin),
                "device": self._device(strategy, local, kin, chosen),
                "devices": names,
            }
            for local, role in enumerate(kin)
        ]
        shares = [
            cores[len(cores) * local // local_size : len(cores) * (local + 1) // local_size]
            for local in range(local_size)
        ]
        return places, shares if self.pin else [[]] * local_size

    def _threads(self, role: str, kin: list[str]) -> int:
        """Of a rank of this role among those of this host, `kin`.

        Trainers divide the cores: what others do, they mostly do while trainers wait.
        """
        sharers = kin.count("trainer") if role == "trainer" and not self.pin else len(kin)
        return self.threads or max(1, devices.cores() // sharers)

    def _device(self, strategy: Strategy, local: int, kin: list[str], chosen: devices.Devices) -> str:
        """Each role is dealt the devices from the first on."""
        role = kin[local]
        if not strategy.computes_on_device(role):
            return "cpu"
        key = "launcher.processes" if role == "trainer" else f"strategy.{role}s"
        return devices.device_of(kin[:local].count(role), kin.count(role), chosen, key)
