"""A strategy of servers and trainers that computes nothing, and what its ranks do: an entry that follows a plan."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtf.api.helper_roles import HelperRoles, RoleContext
from dtf.api.strategy import Program, Strategy
from dtf.api.task import Task
from dtf.core.errors import Exit, PeerError
from dtf.core.types import Event, Failed, Place
from dtf.distributed.world import World
from dtf.host import heartbeat

Send = Callable[[Event], None]


class Trainers(HelperRoles):
    """They hold nothing."""

    replaceable = frozenset({"trainer"})  # type: ignore[assignment]

    def __init__(self, server_device: str) -> None:
        self._server_device = server_device

    def run(self, task: Task, context: RoleContext) -> None:
        """Never called: `follow` is what these ranks do."""
        raise NotImplementedError

    def count_key(self, role: str) -> str:
        return "strategy.servers" if role == "server" else super().count_key(role)

    def on_device(self, role: str) -> bool:
        return role == "trainer" or self._server_device == "cuda"


class RolesStrategy(Strategy):
    """`servers` processes lead, and as many trainers as launcher.processes hold nothing."""

    def __init__(self, servers: int = 1, server_device: str = "cpu") -> None:
        self.servers, self.helper_roles = servers, Trainers(server_device)

    def roles(self, processes: int) -> dict[str, int]:
        return {"server": self.servers, "trainer": processes}

    def check(self, task: Task, processes: int, devices: str) -> None: ...

    def communication(self, devices: str) -> str | None:
        return None

    def setup(self, task: Task, world: World) -> Program:
        raise NotImplementedError


def follow(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Send) -> int:
    """Do what `config["plan"][rank]["<attempt>.<retry>"]` says, by default `work`: a trainer three steps, a server
    until all trainers have done so.
    """
    from dtf.distributed.store import rank_store

    store = rank_store(place, place.start_timeout_s)
    turn = f"{place.attempt}.{place.retry}"
    here = {
        "pid": os.getpid(),
        "role": place.role,
        "files": len(os.listdir("/proc/self/fd")),
        "shown": _shown(place, config["launcher"]),
    }
    Path(folder, f"{place.rank}-{turn}.json").write_text(json.dumps(here))
    store.set(f"here/{place.rank}", str(os.getpid()))
    action = config.get("plan", {}).get(str(place.rank), {}).get(turn, "work")
    return (
        _serve(action, store, place, send)
        if place.role == "server"
        else _train(action, config["launcher"], Path(folder), store, place)
    )


def _serve(action: str, store: Any, place: Place, send: Send) -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    trainers = range(place.size - place.slots, place.size)
    until = "here" if action == "die" else "done"
    while not told and not store.check([f"{until}/{rank}" for rank in trainers]):
        heartbeat.beat("wait", 0)
        time.sleep(0.01)
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if told:
        send(Failed(place.rank, 5, int(Exit.PREEMPTED), "asked to stop; the state is saved", ""))
    return Exit.PREEMPTED if told else Exit.OK


def _train(action: str, launcher: int, folder: Path, store: Any, place: Place) -> int:
    print(f"rank {place.rank} is {place}")
    if action == "die before its child" and os.fork() == 0:  # which keeps what it inherited until the next one is there
        while not Path(folder, f"{place.rank}-{place.attempt}.{place.retry + 1}.json").exists() and folder.exists():
            time.sleep(0.01)
        os._exit(0)
    if action in ("die", "die before its child"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "take the fork server along":
        os.kill(os.getppid(), signal.SIGKILL)
    if action == "tell the launcher to stop":
        store.wait([f"here/{rank}" for rank in range(place.size)])  # a process that has not begun leaves no record
        os.kill(launcher, signal.SIGTERM)
        time.sleep(600)
    if action == "start for ever":
        store.set(f"done/{place.rank}", "")
        stays_in_python()
    for step in range(3):
        heartbeat.beat("step", step)
    if action == "die later":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop at the end":
        store.set(f"done/{place.rank}", "")
    if action in ("stop", "stop at the end"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "hang":
        stays_in_python()
    if action == "fail":
        raise ValueError("a trainer has had enough")
    if action == "lose the server":
        raise PeerError("lost server 0")
    if action.startswith("outlive"):
        server = int(store.get("here/0"))
        store.set(f"done/{place.rank}", "")
        while Path(f"/proc/{server}").exists():
            time.sleep(0.01)
        if action == "outlive and die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "outlive and lose":
            raise PeerError("lost server 0")
        stays_in_python()
    store.set(f"done/{place.rank}", "")
    return 0


def stays_in_python() -> None:
    while True:
        time.sleep(60)


def _shown(place: Place, launcher: int) -> bool:
    """Whether the token is anywhere others could see it."""
    token = place.token.encode()
    files = [
        Path(f"/proc/{pid}/{name}").read_bytes()
        for pid in (os.getpid(), os.getppid(), launcher)
        for name in ("cmdline", "environ")
    ]
    return not token or any(
        token in each
        for each in (*files, json.dumps(dict(os.environ)).encode(), repr(place).encode(), str(place).encode())
    )
