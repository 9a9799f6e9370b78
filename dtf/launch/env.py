"""Ranks that exist already, each a whole `python -m dtf`: started by torchrun, srun, mpirun or a job of Kubernetes.

Nobody launches them from here: they meet at a store, agree on one config and one folder, and become ranks. Whoever
started them restarts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
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
from dtf.core.types import Event, Failed, Place
from dtf.host import devices, network
from dtf.host.devices import MOST_THREADS
from dtf.launch.cluster_env import standing

_MARGIN_S = 10.0
"""For which rank 0, which knows who is missing, may be later than the others in giving up."""

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy
    from dtf.runs.run_folder import Run


@register("launcher", "env")
class Env(Launcher):
    """Take part as the rank that the environment says; every rank runs the same command line."""

    starts_ranks = False

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
        factory=dict, doc="environment variables to set before torch is imported: switches of NCCL, gloo, OpenMP"
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
        return standing(os.environ).size

    def check(self, strategy: Strategy) -> None:
        size = standing(os.environ).size
        check_one_role("env", strategy, size)
        needed = sum(strategy.roles(size).values())
        if needed != size:
            raise ConfigError(
                f"this strategy needs {needed} processes, {size} were started; start {needed}, or use launcher=local"
            )
        self._device()

    def meeting_point(self) -> tuple[str, int, bool]:
        me = standing(os.environ)
        return me.address, me.port, me.rank == 0 and not _outlives()

    def open(self, config: dict[str, Any], make: Callable[[str], Run], command: Sequence[str] = ()) -> Run:
        """Agree with the other ranks; collective. Rank 0 makes the run for all.

        ConfigError names the rank that differs and in what.
        """
        from dtf.config.settings import parse_settings
        from dtf.runs.run_folder import Run, versions

        self._me = standing(os.environ)
        os.environ |= network.socket_variables(self.interface, (self._me.address, self._me.port), os.environ) | self.env
        store = self._meet()
        mine = {
            "config": shared_keys(config),
            "versions": versions(),
            "world size": self._me.size,
            "devices": self.devices_kind(),
        }
        if self._me.rank == 0:
            return self._lead(store, mine, make)
        expected = json.loads(self._get(store, "task", 0))
        wrong = "; ".join(differences(expected, mine, "rank 0"))
        store.set(f"differs/{self._me.rank}", json.dumps([self._name(), wrong]))
        answer = json.loads(self._get(store, "run", 0, _MARGIN_S))
        store.set(f"heard/{self._me.rank}", "")
        if "folder" not in answer:
            raise error_from_json(answer)
        if wrong:  # rank 0 was told to expect fewer ranks than this one, and did not listen
            raise refusal(self._name(), "rank 0", wrong)
        return Run(Path(answer["folder"]), answer["id"], config, parse_settings(config), leader=False)

    def _lead(self, store: Store, task: dict[str, Any], make: Callable[[str], Run]) -> Run:
        """Rank 0's side of `open`: says what the task is, hears who differs, makes the run and says where, or why
        not.
        """
        store.set("task", json.dumps(task))
        answer: dict[str, Any] = {}
        came: list[int] = []
        deadline = time.monotonic() + self.meet_timeout_s
        try:
            for other in range(1, self._me.size):
                if _outlives():
                    self._invite(store, other, deadline)
                name, wrong = json.loads(self._await(store, other, deadline))
                came.append(other)
                if wrong:
                    raise refusal(name, "rank 0", wrong)
            before = "folder"  # a store that outlives its ranks tells the folder of the first attempt
            run = make(self._all.get(before).decode() if self._all.check([before]) else "")
            self._all.set(before, str(run.folder))
            answer = {"folder": str(run.folder), "id": run.id}
            return run
        except DtfError as error:
            answer = error_to_json(error)
            raise
        finally:
            store.set("run", json.dumps(answer))
            if "folder" not in answer:  # this process ends, and the store with it
                with contextlib.suppress(RuntimeError):
                    came += [
                        other
                        for other in range(1, self._me.size)
                        if other not in came and store.check([f"differs/{other}"])
                    ]
                    store.wait([f"heard/{other}" for other in came], timedelta(seconds=10))

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        from dtf.launch.rank_process import entry as function

        me = self._me
        roles = [role for role, number in run.strategy.roles(me.size).items() for _ in range(number)]
        place = Place(
            rank=me.rank,
            size=me.size,
            local_rank=me.local_rank,
            local_size=me.local_size,
            role=roles[me.rank],
            slots=me.size,
            device=self._device(),
            threads=self.threads or max(1, devices.cores() // me.local_size),
            store=f"{me.address}:{me.port}",
            prefix=f"{run.id}/{self._attempt}",
            attempt=self._attempt,
        )
        failed: list[Failed] = []
        lock = threading.Lock()  # a checkpoint may be reported from a thread of its own

        def hear(event: Event) -> None:
            with lock:
                if isinstance(event, Failed):
                    failed.append(event)
                see(event)

        exit = function(entry)(run.config, str(run.folder), run.id, place, hear)
        if failed:
            report(failed[0])
        self._part(exit)
        return exit

    def _device(self) -> str:
        """The GPU of this rank, or `cpu`. A starter that shows each process one GPU has chosen it already."""
        me, chosen = standing(os.environ), devices.choose(self.devices)
        if self.devices in ("auto", "cuda") and len(chosen.indices) == 1:
            return devices.device_of(0, 1, chosen)
        return devices.device_of(me.local_rank, me.local_size, chosen)

    def _name(self) -> str:
        return f"rank {self._me.rank} on {socket.gethostname()}"

    def _meet(self) -> Store:
        """The store that all ranks of this attempt share; rank 0 hosts it on its address alone, unless torchrun's agent
        does.
        """
        from torch.distributed import PrefixStore, TCPStore

        me, listener = self._me, None
        if me.rank == 0 and not _outlives():
            try:
                listener = network.listen(me.address, me.port).detach()
            except OSError as error:
                raise ConfigError(
                    f"MASTER_ADDR={me.address} MASTER_PORT={me.port}: rank 0 cannot listen there: "
                    f"{error.strerror or error}; "
                    "give an address of its host and a free port"
                ) from error
        timeout = timedelta(seconds=self.meet_timeout_s)
        try:
            store = TCPStore(
                me.address,
                me.port,
                is_master=listener is not None,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            raise PeerError(
                f"rank {me.rank} found no store at MASTER_ADDR={me.address} MASTER_PORT={me.port}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self._all = PrefixStore(f"dtf/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        self._attempt = self._fence() if _outlives() else 0
        self._store = PrefixStore(str(self._attempt), self._all)
        return self._store

    def _fence(self) -> int:
        """The number of this attempt, from a store that outlives its ranks: keys of an earlier attempt are never met
        thereafter.

        Rank 0 counts it, and `_invite` tells each other rank, which it knows by a word that this very process has left.
        torchrun's own count will not do: where ranks were restarted for another host's sake it stays behind.
        """
        if self._me.rank == 0:
            return self._all.add("attempts", 1) - 1
        word = secrets.token_hex(8)
        self._all.set(f"word/{self._me.rank}", word)
        return int(self._get(self._all, f"attempt/{word}", 0))

    def _invite(self, store: Store, other: int, deadline: float) -> None:
        """Rank 0's side of `_fence`: tell rank `other` the attempt, until it is there."""
        word = f"word/{other}"
        while not store.check([f"differs/{other}"]) and time.monotonic() < deadline:
            if self._all.check([word]):  # it may be that of a process that is gone; then another comes
                self._all.set(f"attempt/{self._all.get(word).decode()}", str(self._attempt))
            time.sleep(0.01)

    def _await(self, store: Store, other: int, deadline: float) -> bytes:
        """How rank `other` says it differs.

        PeerError that names all who have said nothing when it does not come in time.
        """
        key = f"differs/{other}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return store.get(key)
        except RuntimeError as error:
            missing = [other]
            with contextlib.suppress(RuntimeError):  # the store may be gone
                missing = [each for each in range(1, self._me.size) if not store.check([f"differs/{each}"])]
            raise PeerError(
                f"rank {', '.join(map(str, missing))} of {self._me.size} did not come to "
                f"{network.endpoint_text(self._me.address, self._me.port)} within "
                f"launcher.meet_timeout_s={self.meet_timeout_s:g}, or is gone; see job=doctor"
            ) from error

    def _get(self, store: Store, key: str, owner: int, longer_s: float = 0.0) -> bytes:
        try:
            store.wait([key], timedelta(seconds=self.meet_timeout_s + longer_s))
            return store.get(key)
        except RuntimeError as error:
            raise PeerError(
                f"rank {owner} did not come within launcher.meet_timeout_s={self.meet_timeout_s:g}, or is gone"
            ) from error

    def _part(self, exit: int) -> None:
        """Rank 0 leaves last when it ends well: it may host the store."""
        if exit == Exit.OK:
            self._store.set(f"done/{self._me.rank}", "")
            if self._me.rank == 0:
                for other in range(1, self._me.size):
                    self._get(self._store, f"done/{other}", other)


def _outlives() -> bool:
    """Whether the store outlives its ranks: torchrun's agent hosts it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
