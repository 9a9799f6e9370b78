"""Ranks that exist already, each a whole `python -m dtf`: started by torchrun, srun, mpirun or a job of Kubernetes.

Nobody launches them from here: they meet at a store, agree on one config and one folder, and become ranks. Whoever started them restarts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf import devices
from dtf.devices import MOST_THREADS
from dtf.errors import ConfigError, DtfError, Exit, PeerError
from dtf.launcher import LONGEST_S, Launcher, Place, report
from dtf.registry import option, register
from dtf.values import Event, Failed

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtf.run import Run
    from dtf.strategy import Strategy

VARIABLES = {
    "RANK": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "MASTER_ADDR": ("MASTER_ADDR",),
    "MASTER_PORT": ("MASTER_PORT",),
}
"""What a rank must know of itself, and under which names torchrun, Slurm, Open MPI and MPICH tell it; the first that is set counts."""


@register("launcher", "env")
class Env(Launcher):
    """Take part as the rank that the environment says; every rank runs the same command line."""

    starts_ranks = False

    devices: str = option(default="auto", doc="`auto`: the GPU of the local rank if there are any; `cpu`; `cuda`; or numbers of GPUs, as in '\"0,2\"'")
    threads: int = option(default=0, least=0, most=MOST_THREADS, doc="intra-op threads of each rank; 0: cores divided by the ranks of this host")
    meet_timeout_s: float = option(default=600.0, above=0, most=LONGEST_S, doc="time for all ranks to arrive and agree", unit="s")

    def devices_kind(self) -> str:
        return devices.choose(self.devices).kind

    def count(self) -> int:
        return _environment()["WORLD_SIZE"]

    def check(self, strategy: Strategy) -> None:
        values = _environment()
        size = sum(strategy.roles(values["WORLD_SIZE"]).values())
        if size != values["WORLD_SIZE"]:
            raise ConfigError(f"this strategy needs {size} processes, WORLD_SIZE={values['WORLD_SIZE']} were started; start {size}, or use launcher=local")
        devices.device_of(values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"], devices.choose(self.devices))

    def open(self, config: dict[str, Any], make: Callable[[str], Run]) -> Run:
        """Agree with the other ranks; collective. Rank 0 makes the run for all. ConfigError names the rank that differs and in what."""
        from dtf.run import Run, versions
        from dtf.settings import typed

        store = self._meet()
        mine = {"config": config, "versions": versions(), "WORLD_SIZE": self._size}
        if self._rank == 0:
            return self._lead(store, mine, make)
        expected = json.loads(self._get(store, "task", 0))
        wrong = "; ".join(differences(expected, mine))
        store.set(f"differs/{self._rank}", wrong)
        answer = json.loads(self._get(store, "run", 0))
        store.set(f"heard/{self._rank}", "")
        if "folder" not in answer:
            raise _error(answer)
        if wrong:  # rank 0 was told to expect fewer ranks than this one, and did not listen
            raise _differs(self._rank, wrong)
        return Run(Path(answer["folder"]), answer["id"], config, typed(config), leader=False)

    def _lead(self, store: Store, task: dict[str, Any], make: Callable[[str], Run]) -> Run:
        """Rank 0's side of `open`: says what the task is, hears who differs, makes the run and says where, or why not."""
        store.set("task", json.dumps(task))
        answer: dict[str, Any] = {}
        came: list[int] = []
        try:
            for other in range(1, self._size):
                wrong = self._get(store, f"differs/{other}", other).decode()
                came.append(other)
                if wrong:
                    raise _differs(other, wrong)
            before = f"{self._runs}/folder"  # torchrun's store outlives a restart: go on in the folder of the first attempt
            run = make(self._all.get(before).decode() if self._all.check([before]) else "")
            self._all.set(before, str(run.folder))
            answer = {"folder": str(run.folder), "id": run.id}
            return run
        except DtfError as error:
            answer = {"exit": int(error.exit), "message": str(error)}
            raise
        finally:
            store.set("run", json.dumps(answer))
            if "folder" not in answer:  # this process ends, and the store with it
                with contextlib.suppress(RuntimeError):
                    came += [other for other in range(1, self._size) if other not in came and store.check([f"differs/{other}"])]
                    store.wait([f"heard/{other}" for other in came], timedelta(seconds=10))

    def launch(self, run: Run, see: Callable[[Event], None]) -> int:
        from dtf.worker import work

        values = _environment()
        rank, size, local_size = self._rank, self._size, values["LOCAL_WORLD_SIZE"]
        roles = [role for role, number in run.settings.strategy.roles(size).items() for _ in range(number)]
        place = Place(
            rank=rank,
            size=size,
            local_rank=values["LOCAL_RANK"],
            local_size=local_size,
            role=roles[rank],
            slots=size,
            device=devices.device_of(values["LOCAL_RANK"], local_size, devices.choose(self.devices)),
            threads=self.threads or max(1, devices.cores() // local_size),
            store=f"{values['MASTER_ADDR']}:{values['MASTER_PORT']}",
            prefix=f"{run.id}/{_restarts()}",
            attempt=_restarts(),
        )
        failed: list[Failed] = []
        lock = threading.Lock()  # a checkpoint may be reported from a thread of its own

        def hear(event: Event) -> None:
            with lock:
                if isinstance(event, Failed):
                    failed.append(event)
                see(event)

        exit = work(run.config, str(run.folder), run.id, place, hear)
        if failed:
            report(failed[0])
        self._part(exit)
        return exit

    def _meet(self) -> Store:
        """The store that all ranks of this attempt share; rank 0 hosts it on MASTER_ADDR alone, unless torchrun's agent does."""
        from torch.distributed import PrefixStore, TCPStore

        values = _environment()
        self._rank, self._size = values["RANK"], values["WORLD_SIZE"]
        address, port, listener = values["MASTER_ADDR"], values["MASTER_PORT"], None
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank == 0 and not hosted:
            try:
                listener = socket.create_server((address, port), backlog=1024).detach()
            except OSError as error:
                raise ConfigError(
                    f"MASTER_ADDR={address} MASTER_PORT={port}: rank 0 cannot listen there: {error.strerror}; give an address of its host and a free port"
                ) from error
        timeout = timedelta(seconds=self.meet_timeout_s)
        try:
            store = TCPStore(address, port, is_master=listener is not None, wait_for_workers=False, timeout=timeout, master_listen_fd=listener)
        except RuntimeError as error:
            raise PeerError(f"rank {self._rank} found no store at MASTER_ADDR={address} MASTER_PORT={port}: {str(error).splitlines()[0]}") from error
        self._runs = f"dtf/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        self._all, self._store = store, PrefixStore(f"{self._runs}/{_restarts()}", store)
        return self._store

    def _get(self, store: Store, key: str, owner: int) -> bytes:
        try:
            return store.get(key)
        except RuntimeError as error:
            raise PeerError(f"rank {owner} did not come within launcher.meet_timeout_s={self.meet_timeout_s:g}, or is gone") from error

    def _part(self, exit: int) -> None:
        """Rank 0 leaves last when it ends well: it may host the store."""
        if exit == Exit.OK:
            self._store.set(f"done/{self._rank}", "")
            if self._rank == 0:
                for other in range(1, self._size):
                    self._get(self._store, f"done/{other}", other)


def differences(expected: Any, found: Any, key: str = "") -> Iterator[str]:
    """`key=found, rank 0 has expected` for every leaf in which two trees of JSON differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            inner = f"{key}.{name}" if key else name
            yield from differences(expected.get(name), found.get(name), inner)
    elif expected != found:
        yield f"{key.removeprefix('config.')}={json.dumps(found)}, rank 0 has {json.dumps(expected)}"


def _differs(rank: int, how: str) -> ConfigError:
    return ConfigError(f"rank {rank} differs from rank 0: {how}; give every rank the same command line, the same installation and the same WORLD_SIZE")


def _environment() -> dict[str, Any]:
    """The VARIABLES, numbers as numbers. ConfigError for those that are missing or make no sense."""
    found: dict[str, Any] = {}
    for name, known in VARIABLES.items():
        found[name] = next((os.environ[key] for key in known if os.environ.get(key)), None)
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ConfigError(f"launcher=env needs the variables {', '.join(missing)}; start with torchrun, srun or mpirun, or use launcher=local")
    for name in found.keys() - {"MASTER_ADDR"}:
        if not found[name].isdigit():
            raise ConfigError(f"{name}={found[name]} is no number; launcher=env takes it from the environment")
        found[name] = int(found[name])
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if found[rank] >= found[size]:
            raise ConfigError(f"{rank}={found[rank]} must be less than {size}={found[size]}")
    return found


def _restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _error(answer: dict[str, Any]) -> DtfError:
    """Rank 0's failure, as this rank's own."""
    classes = {int(cls.exit): cls for cls in DtfError.__subclasses__()}
    return classes.get(answer.get("exit", 0), PeerError)(answer.get("message", "rank 0 failed before the run began"))
