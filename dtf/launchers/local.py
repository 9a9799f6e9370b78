"""Ranks on this host, forked from a process that has torch imported, watched and restarted by this one, which never imports it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dtf import devices
from dtf.attempt import Attempt, Limits, Stop
from dtf.devices import MOST_PROCESSES, MOST_THREADS
from dtf.errors import ConfigError
from dtf.forkserver import ForkServer
from dtf.launcher import LONGEST_S, Launcher, Place, report
from dtf.registry import option, register, suggest
from dtf.schema import KeyProblem, show
from dtf.supervise import NO_PROGRESS, supervise
from dtf.values import Event

if TYPE_CHECKING:
    from dtf.run import Run
    from dtf.strategy import Strategy

PRELOAD = ["dtf.preload"]
"""What a rank imports before its first step. Must not touch CUDA: a forked process cannot use it after that."""

_server: ForkServer | None = None  # one per launching process: it outlives a run, so that the next one of a sweep starts warm


def prestart(argv: Sequence[str]) -> None:
    """Start importing torch in the fork server, beside the composing of the config, when the command line looks like a run of ranks of this host."""
    global _server
    flags = [
        word for word in argv if word.startswith("-") and word not in ("-m", "--multirun", "-r", "--run") and not word.startswith(("-cd", "--config-", "-cn"))
    ]
    words = dict(word.split("=", 1) for word in argv if "=" in word)
    own_environment = any(key.lstrip("+").startswith("launcher.env") for key in words)
    if not flags and not own_environment and words.get("launcher", "local") == "local" and words.get("job", "train") in ("train", "verify") and _server is None:
        _server = _start({})


def warm(environment: dict[str, str]) -> ForkServer:
    """The fork server of this process; a new one when ranks need another environment from their first import on, or when it has died."""
    global _server
    if _server is not None and (_server.environment != _environment(environment) or (_server.used and not _server.alive)):
        discard()
    if _server is None:
        _server = _start(environment)
    return _server


def discard() -> None:
    """End the fork server: the config turned out wrong, or nothing more is to be run."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


@register("launcher", "local")
class Local(Launcher):
    """Start ranks on this host, watch them, restart them from the last checkpoint when one is lost."""

    processes: int | Literal["auto"] = option(
        default="auto", least=1, most=MOST_PROCESSES, doc="how far to spread; `auto`: one process per GPU, without GPUs 2"
    )
    devices: str = option(default="auto", doc="`auto`: GPUs if there are any; `cpu`; `cuda`; or numbers of GPUs, as in launcher.devices='\"0,2\"'")
    threads: int = option(default=0, least=0, most=MOST_THREADS, doc="intra-op threads of each rank; 0: cores divided by ranks")
    pin: bool = option(default=False, doc="give each rank cores of its own")
    env: dict[str, str] = option(factory=dict, doc="environment variables for ranks, beside those of this process")
    interface: str = option(default="", doc="network interface of gloo and nccl; empty: loopback, all ranks are on this host")
    max_restarts: int = option(
        default=NO_PROGRESS,
        least=0,
        most=NO_PROGRESS,  # as many without a new checkpoint end a run anyway
        doc="restarts after a lost rank; counts again from 0 after a new checkpoint",
    )
    hang_timeout_s: float = option(
        default=60.0,
        above=0,
        most=LONGEST_S,
        doc="silence of a rank within a step that means it hangs; in any phase the time it may be stopped by a signal",
        unit="s",
    )
    start_timeout_s: float = option(
        default=600.0, above=0, most=LONGEST_S, doc="the same while starting, the first step included, evaluating and saving", unit="s"
    )
    grace_s: float = option(default=25.0, least=0, most=LONGEST_S, doc="time to save after SIGTERM or SIGINT before ranks are killed", unit="s")

    def devices_kind(self) -> str:
        return devices.choose(self.devices).kind

    def count(self) -> int:
        for name, value in self.env.items():
            if not name or "=" in name:
                raise KeyProblem("launcher.env", f"launcher.env.{show(name)}={show(value)} must be a name without '=', and its value")
        known = [name for _, name in socket.if_nameindex()]
        if self.interface and self.interface not in known:
            raise ConfigError(f"launcher.interface={self.interface} is no network interface of this host; {suggest(self.interface, known)}")
        if sys.platform != "linux":
            raise ConfigError(f"launcher=local needs Linux, this is {sys.platform}; use launcher=inline")
        return devices.processes(self.processes, devices.choose(self.devices))

    def check(self, strategy: Strategy) -> None:
        self._places(strategy)

    def launch(self, run: Run, see: Callable[[Event], None]) -> int:
        return self.start(run, see, "dtf.worker:work")

    def start(self, run: Run, see: Callable[[Event], None], entry: str) -> int:
        """`launch` with ranks that run the function `entry`, "module:function", see `rank.Entry`."""
        places, pins = self._places(run.settings.strategy)
        order = {
            "entry": entry,
            "config": run.config,
            "folder": str(run.folder),
            "run_id": run.id,
            "environment": {**os.environ, **self._network(), **_environment(self.env)},
            "directory": os.getcwd(),
            "path": [os.path.abspath(part) for part in sys.path],
        }
        limits = Limits(self.hang_timeout_s, self.start_timeout_s, self.grace_s)
        with Stop() as stop:

            def attempt(number: int) -> Attempt:
                here = [Place(**{**place, "attempt": number, "prefix": f"{run.id}/{number}"}) for place in places]
                return Attempt(warm(self.env), order, here, pins, run.folder, limits, stop, see)

            outcome = supervise(attempt, self.max_restarts, lambda: stop.count > 0, see)
        if outcome.cause:
            see(outcome.cause)
            report(outcome.cause)
        return outcome.exit

    def _places(self, strategy: Strategy) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Where each rank stands, but for what an attempt adds; and the cores it is pinned to, none when it is not."""
        slots, chosen = self.count(), devices.choose(self.devices)
        roles = [role for role, number in strategy.roles(slots).items() for _ in range(number)]
        size, cores = len(roles), sorted(os.sched_getaffinity(0))
        if self.pin and len(cores) < size:
            raise ConfigError(f"launcher.pin=true needs a core for each of {size} ranks, there are {len(cores)}; use launcher.pin=false")
        allowed = devices.allow_files(files(MOST_PROCESSES))
        if allowed < files(size):
            raise ConfigError(f"launcher.processes={slots} needs {files(size)} open files in one process, this shell allows {allowed}; see ulimit -n")
        threads = self.threads or max(1, devices.cores() // size)
        names = [devices.device_of(slot, slots, chosen) for slot in range(slots)]
        places = [
            {"rank": rank, "size": size, "local_rank": rank, "local_size": size, "role": role, "slots": slots, "threads": threads}
            | {"device": devices.device_of(rank, size, chosen), "devices": names}
            for rank, role in enumerate(roles)
        ]
        shares = [cores[len(cores) * rank // size : len(cores) * (rank + 1) // size] for rank in range(size)]
        return places, shares if self.pin else [[]] * size

    def _network(self) -> dict[str, str]:
        if self.interface:
            return {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        return {key: os.environ.get(key, "lo") for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def files(ranks: int) -> int:
    """Open files that are enough for a rank, which has a socket to each other one and may host their store, and for the launching process."""
    return 128 + 4 * ranks


def _start(environment: dict[str, str]) -> ForkServer:
    devices.allow_files(files(MOST_PROCESSES))  # ranks inherit it
    return ForkServer(PRELOAD, _environment(environment))


def _environment(extra: dict[str, str]) -> dict[str, str]:
    return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **extra}  # is_available() without starting CUDA
