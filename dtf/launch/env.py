"""Ranks that exist already, each a `python -m dtf`: started by torchrun, srun, mpirun or a job of Kubernetes.

They connect to one store, agree on one config and one run folder, and become ranks. What started them restarts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.launcher import LONGEST_S, WORK, Launcher, check_environment, check_one_role, report
from dtf.api.registry import option, register
from dtf.core.consistency import differences, error_from_json, error_to_json, refusal, shared_keys
from dtf.core.errors import ConfigError, DtfError, Exit, PeerError
from dtf.core.own_code import CODE, own_code
from dtf.core.types import Event, Failed, Place
from dtf.host import devices, network
from dtf.host.deadline import deadline
from dtf.host.devices import MOST_THREADS
from dtf.host.signals import asked_to_stop
from dtf.launch.cluster_env import rank_environment
from dtf.launch.forkserver import die_with

_MARGIN_S = 10.0
"""How much longer the others wait for rank 0, which knows who is missing, so that it gives up first."""
_PATIENCE_S = 30.0
"""Seconds of waiting for other ranks before a line says so: ranks of many hosts start seconds apart."""

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy
    from dtf.runs.run_folder import Run


@register("launcher", "env")
class Env(Launcher):
    """Take part as the rank that the environment says; every rank runs the same command line."""

    starts_ranks = False
    hears_all = False
    in_this_process = True

    devices: str = option(
        default="auto",
        doc="`auto`: the GPU of the local rank if there are any; `cpu`; `cuda`; or numbers of GPUs, as in '\"0,2\"'",
    )
    threads: int = option(
        default=0,
        least=0,
        most=MOST_THREADS,
        doc="intra-op threads of each rank; 0: cores divided by the ranks of this host",
    )
    env: dict[str, str] = option(
        factory=dict,
        doc="environment variables to set before torch is imported; a config file sets switches of NCCL, gloo, "
        "OpenMP and CUDA alone",
    )
    interface: str = option(
        default="", doc="network interface of gloo and nccl; empty: gloo takes the one towards rank 0, nccl chooses"
    )
    meet_timeout_s: float = option(
        default=600.0, above=0, most=LONGEST_S, doc="time for all ranks to arrive and agree", unit="s"
    )

    def devices_kind(self) -> str:
        return devices.choose(self.devices).kind

    def count(self) -> int:
        check_environment(self.env)
        network.check_interface(self.interface)
        return rank_environment(os.environ).size

    def check(self, strategy: Strategy) -> None:
        size = rank_environment(os.environ).size
        check_one_role("env", strategy, size)
        needed = sum(strategy.roles(size).values())
        if needed != size:
            raise ConfigError(
                f"this strategy needs {needed} processes, {size} were started; start {needed}, or use launcher=local"
            )
        self._device()

    def meeting_point(self) -> tuple[str, int, bool]:
        environment = rank_environment(os.environ)
        return environment.address, environment.port, environment.rank == 0 and not _agent_hosts_store()

    def open(self, config: dict[str, Any], make: Callable[[str], Run], command: Sequence[str] = ()) -> Run:
        """Agree with the other ranks; rank 0 makes the run for all. Collective.

        ConfigError names the rank that differs and in what.
        """
        self._environment = rank_environment(os.environ)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # an agent that is killed leaves its ranks behind, which would train on
            die_with(os.getppid())
        address = self._environment.address, self._environment.port
        os.environ |= network.socket_variables(self.interface, address, os.environ) | self.env
        timer = threading.Timer(_PATIENCE_S, self._say_who_is_awaited)
        timer.daemon = True
        timer.start()
        try:
            return self._agree(config, make)
        finally:
            timer.cancel()

    def _say_who_is_awaited(self) -> None:
        environment = self._environment
        others = "the other ranks" if environment.rank == 0 else "rank 0"
        print(
            f"dtf: rank {environment.rank} of {environment.size} waits at {environment.address}:{environment.port} for "
            f"{others}, up to launcher.meet_timeout_s={self.meet_timeout_s:g}",
            file=sys.stderr,
            flush=True,
        )

    def _agree(self, config: dict[str, Any], make: Callable[[str], Run]) -> Run:
        """See `open`."""
        from dtf.config.settings import parse_settings
        from dtf.runs.run_folder import Run, versions

        store = self._connect()
        task = {
            "config": shared_keys(config),
            "versions": versions(),
            CODE: own_code(),
            "world size": self._environment.size,
            "devices": self.devices_kind(),
        }
        if self._environment.rank == 0:
            return self._open_as_leader(store, task, make)
        expected = json.loads(self._get(store, "task", 0))
        wrong = "; ".join(differences(expected, task, "rank 0"))
        store.set(f"differs/{self._environment.rank}", json.dumps([self._name(), wrong]))
        answer = json.loads(self._get(store, "run", 0, _MARGIN_S))
        store.set(f"heard/{self._environment.rank}", "")
        if "folder" not in answer:
            raise error_from_json(answer)
        if wrong:  # rank 0 expects fewer ranks than this one, and did not compare it
            raise refusal(self._name(), "rank 0", wrong)
        return Run(Path(answer["folder"]), answer["id"], config, parse_settings(config), leader=False)

    def _open_as_leader(self, store: Store, task: dict[str, Any], make: Callable[[str], Run]) -> Run:
        """Rank 0's side of `open`: publish the task, wait for what others say differs, make the run, publish it.

        An error is published in place of the run, and raised.
        """
        store.set("task", json.dumps(task))
        answer: dict[str, Any] = {}
        arrived: list[int] = []
        deadline = time.monotonic() + self.meet_timeout_s
        try:
            for other in range(1, self._environment.size):
                if _agent_hosts_store():
                    self._invite(store, other, deadline)
                name, wrong = json.loads(self._await(store, other, deadline))
                arrived.append(other)
                if wrong:
                    raise refusal(name, "rank 0", wrong)
            key = "folder"  # a store that outlives its ranks has the folder of the first attempt
            run = make(self._run_store.get(key).decode() if self._run_store.check([key]) else "")
            self._run_store.set(key, str(run.folder))
            answer = {"folder": str(run.folder), "id": run.id}
            return run
        except DtfError as error:
            answer = error_to_json(error)
            raise
        finally:
            store.set("run", json.dumps(answer))
            if "folder" not in answer:  # this process ends, and the store with it
                with contextlib.suppress(RuntimeError):
                    arrived += [
                        other
                        for other in range(1, self._environment.size)
                        if other not in arrived and store.check([f"differs/{other}"])
                    ]
                    store.wait([f"heard/{other}" for other in arrived], timedelta(seconds=10))

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        from dtf.launch.rank_process import entry as function

        environment = self._environment
        roles = [role for role, number in run.strategy.roles(environment.size).items() for _ in range(number)]
        place = Place(
            rank=environment.rank,
            size=environment.size,
            local_rank=environment.local_rank,
            local_size=environment.local_size,
            role=roles[environment.rank],
            slots=environment.size,
            device=self._device(),
            threads=self.threads or max(1, devices.cores() // environment.local_size),
            store=f"{environment.address}:{environment.port}",
            prefix=f"{run.id}/{self._attempt}",
            attempt=self._attempt,
            deadline=deadline(os.environ),
        )
        failed: list[Failed] = []
        lock = threading.Lock()  # a checkpoint may be reported from a thread of its own

        def observe(event: Event) -> None:
            with lock:
                if isinstance(event, Failed):
                    failed.append(event)
                see(event)

        exit = function(entry)(run.config, str(run.folder), run.id, place, observe)
        if failed:
            report(failed[0])
        self._leave(exit)
        return exit

    def _device(self) -> str:
        """The GPU of this rank, or `cpu`. Some clusters show each process one GPU only: then it is that one."""
        environment, chosen = rank_environment(os.environ), devices.choose(self.devices)
        if self.devices in ("auto", "cuda") and len(chosen.indices) == 1:
            return devices.device_of(0, 1, chosen)
        return devices.device_of(environment.local_rank, environment.local_size, chosen)

    def _name(self) -> str:
        """What errors call this rank."""
        return f"rank {self._environment.rank} on {socket.gethostname()}"

    def _connect(self) -> Store:
        """The store that all ranks of this attempt share. Collective.

        Rank 0 hosts it, on MASTER_ADDR alone, unless torchrun's agent does. ConfigError or PeerError without one.
        """
        from torch.distributed import PrefixStore, TCPStore

        environment, listener = self._environment, None
        if environment.rank == 0 and not _agent_hosts_store():
            try:
                listener = network.listen(environment.address, environment.port).detach()
            except OSError as error:
                raise ConfigError(
                    f"MASTER_ADDR={environment.address} MASTER_PORT={environment.port}: rank 0 cannot listen there: "
                    f"{error.strerror or error}; give an address of its host and a free port"
                ) from error
        timeout = timedelta(seconds=self.meet_timeout_s)
        try:
            store = TCPStore(
                environment.address,
                environment.port,
                is_master=listener is not None,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            raise PeerError(
                f"rank {environment.rank} found no store at MASTER_ADDR={environment.address} "
                f"MASTER_PORT={environment.port}: {str(error).splitlines()[0]}"
            ) from error
        self._run_store = PrefixStore(f"dtf/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        self._attempt = self._fence() if _agent_hosts_store() else 0
        self._store = PrefixStore(str(self._attempt), self._run_store)
        return self._store

    def _fence(self) -> int:
        """The number of this attempt in a store that outlives its ranks, so that keys of earlier attempts do not match.

        Rank 0 counts attempts. Each other process leaves a random word in the store, and `_invite` answers it with the
        number. torchrun's own count is not used: it stays behind where ranks restart because of another host.
        """
        if self._environment.rank == 0:
            return self._run_store.add("attempts", 1) - 1
        word = secrets.token_hex(8)
        self._run_store.set(f"word/{self._environment.rank}", word)
        return int(self._get(self._run_store, f"attempt/{word}", 0))

    def _invite(self, store: Store, other: int, deadline: float) -> None:
        """Rank 0's side of `_fence`: send rank `other` the number of the attempt, until it has arrived."""
        word = f"word/{other}"
        while not store.check([f"differs/{other}"]) and time.monotonic() < deadline:
            if self._run_store.check([word]):  # if it is of a process that is gone, another word follows
                self._run_store.set(f"attempt/{self._run_store.get(word).decode()}", str(self._attempt))
            time.sleep(0.01)

    def _await(self, store: Store, other: int, deadline: float) -> bytes:
        """What rank `other` says of how it differs.

        PeerError that names all ranks which are missing, when it does not arrive in time.
        """
        key = f"differs/{other}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return store.get(key)
        except RuntimeError as error:
            missing = [other]
            with contextlib.suppress(RuntimeError):  # the store may be gone
                missing = [rank for rank in range(1, self._environment.size) if not store.check([f"differs/{rank}"])]
            raise PeerError(
                f"rank {', '.join(map(str, missing))} of {self._environment.size} did not come to "
                f"{network.endpoint_text(self._environment.address, self._environment.port)} within "
                f"launcher.meet_timeout_s={self.meet_timeout_s:g}, or is gone; see job=doctor"
            ) from error

    def _get(self, store: Store, key: str, owner: int, longer_s: float = 0.0) -> bytes:
        """The value that rank `owner` sets; waits for it. PeerError when it is not set in time."""
        try:
            store.wait([key], timedelta(seconds=self.meet_timeout_s + longer_s))
            return store.get(key)
        except RuntimeError as error:
            raise PeerError(
                f"rank {owner} did not come within launcher.meet_timeout_s={self.meet_timeout_s:g}, or is gone"
            ) from error

    def _leave(self, exit: int) -> None:
        """After a good end: rank 0, which may host the store, waits until all others have ended, or it is told to
        stop.
        """
        if exit == Exit.OK:
            self._store.set(f"done/{self._environment.rank}", "")
            if self._environment.rank == 0:
                deadline = time.monotonic() + self.meet_timeout_s
                for other in range(1, self._environment.size):
                    while not asked_to_stop() and not self._store.check([f"done/{other}"]):
                        if time.monotonic() > deadline:
                            raise PeerError(
                                f"rank {other} did not end within launcher.meet_timeout_s={self.meet_timeout_s:g}"
                            )
                        time.sleep(0.01)


def _agent_hosts_store() -> bool:
    """Whether torchrun's agent hosts the store, which then outlives its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
