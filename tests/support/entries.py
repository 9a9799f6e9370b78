"""What ranks do in the tests of launchers: each function is an entry as `dtf.engine.train.work`, and does one thing
that happens to real ranks.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtf.core.errors import ConfigError, DataError, DivergedError, Exit, SaveError
from dtf.core.types import Ended, Event, Failed, Note, Place, Saved, Started
from dtf.host import heartbeat
from dtf.host.waits import Operation, group_of

Send = Callable[[Event], None]


def meet(place: Place) -> Any:
    """Join the other ranks; their process group's store, under this attempt's prefix. Returns when all have joined:
    whoever leaves next may take the store along.
    """
    import torch.distributed as dist

    from dtf.distributed.store import rank_store

    store = rank_store(place, place.start_timeout_s)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    dist.barrier()
    return store


def add(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Sum ranks, print, and report where this rank stands."""
    import torch
    import torch.distributed as dist

    meet(place)
    total = torch.tensor([place.rank + 1])
    dist.all_reduce(total)
    print(f"rank {place.rank} prints")
    os.write(2, b"and writes\n")
    if place.rank == 0:
        send(Started(0, 10, 5, {"text": config.get("text", "")}))
        send(Ended(10, "finished", {"sum": float(total)}))
    here = {
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "directory": os.getcwd(),
        "pid": os.getpid(),
        "server": os.getppid(),
    }
    here |= {
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith(("DTF_TEST", "GLOO", "NCCL"))
        },
        "listening": listening(),
    }
    here["files"] = len(os.listdir("/proc/self/fd"))
    Path(folder, f"{place.rank}.json").write_text(json.dumps(here))
    dist.barrier()
    return 0


def listening() -> list[str]:
    """Addresses on which this process listens, as /proc shows them: hexadecimal, `0100007F` is 127.0.0.1."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].split(":")[0])
    return found


def killed_once(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Rank 1 is killed at the first attempt; the others wait for it.

    The second attempt looks for what the first one left.
    """
    import torch.distributed as dist

    store = meet(place)
    heartbeat.beat("step", 7)
    if place.rank == 0:
        send(Note("info", json.dumps([place.prefix, store.check(["left"])])))
        store.set("left", "by an earlier attempt")
    dist.barrier()
    if place.attempt == 0 and place.rank == 1:
        Path(folder, "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


def server_killed_once(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    if place.attempt == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return 0


def server_stopped_once(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    if place.attempt == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    return 0


def fails(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Rank 1 raises what the config names; rank 0 then loses its connection."""
    import torch.distributed as dist

    meet(place)
    if place.rank == 0 and config.get("saved"):
        send(Saved(3, "checkpoints/step_000003", False, 0.1))
    dist.barrier()
    if place.rank == 1:
        errors = {"config": ConfigError, "data": DataError, "diverged": DivergedError, "value": ValueError}
        errors |= {"save": SaveError, "full": lambda text: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}
        raise errors[config["error"]]("rank one has had enough")
    dist.barrier()
    return 0


def server_stopped_then_told(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Stop the server and tell the launching process to stop; save and leave when that comes back."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    heartbeat.beat("step", 5)
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(config["launcher"], signal.SIGTERM)
    while not told:
        time.sleep(0.01)
    send(Failed(place.rank, 5, int(Exit.PREEMPTED), "asked to stop; the state is saved", ""))
    return Exit.PREEMPTED


def hangs(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """After its second step rank 1 is stopped, in a step or in the phase the config names, or stays in Python code;
    rank 0 waits for it.
    """
    import torch.distributed as dist

    meet(place)
    for step in range(2):
        heartbeat.beat("step", step)
        dist.barrier()
    if "phase" in config:
        heartbeat.beat(config["phase"], 2)
        dist.barrier()
    if place.rank == 1:
        if config["how"] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        heartbeat.beat("evaluate", 2) if config["how"] == "evaluating" else None
        stays_in_python()
    heartbeat.beat(config.get("phase", "step"), 2)
    dist.barrier()
    return 0


def waits_in_a_circle(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Each of two ranks waits in an operation that the other one does not enter."""
    name = ("red", "blue")[place.rank]
    heartbeat.beat("step", 3)
    with Operation(f"the {name} sum", group_of(name, (0, 1))):
        stays_in_python()
    return 0


def stays_in_python() -> None:
    while True:
        time.sleep(60)


def stoppable(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Save and leave with 75 when told to, unless the config says `deaf`; rank 0 tells the launching process, `signals`
    times.
    """
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    meet(place)
    heartbeat.beat("step", 5)
    if place.rank == 0:
        for _ in range(2 if config.get("twin") else 1):  # as `timeout` does
            os.kill(config["launcher"], signal.SIGTERM)
    while not told:
        time.sleep(0.01)  # `pause` would wait for ever for a signal that came just before it
    while config["signals"] == 2 and place.rank == 0:  # somebody insists
        time.sleep(0.3)
        os.kill(config["launcher"], signal.SIGTERM)
    while config["deaf"]:
        time.sleep(60)
    send(Failed(place.rank, 5, int(Exit.PREEMPTED), "asked to stop; the state is saved", ""))
    return Exit.PREEMPTED


def told_before_it_listens(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Rank 0 tells the launching process to stop while no rank has set a handler, or looks whether it was called."""
    if config["deaf"]:
        signal.signal(signal.SIGTERM, lambda *_: None)
    if place.rank == 0:
        os.kill(config["launcher"], signal.SIGTERM)
    time.sleep(600)
    return 0


def warns(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    send(Note("warning", f"rank {place.rank} warns"))
    return 0


def leaves(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    print("something is printed", flush=True)
    os._exit(config.get("status", 3))


def crashes(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    return 0


def floods(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """More events than a socket buffers."""
    for number in range(2000):
        send(Note("info", f"{number} {'x' * 1000}"))
    return 0


def waits(config: dict, folder: str, run_id: str, place: Place, send: Send) -> int:
    """Say who there is through the socket the config names, then wait for ever."""
    with socket.create_connection(("127.0.0.1", config["port"])) as channel:
        channel.sendall(f"{os.getpid()} {os.getppid()}\n".encode())
        time.sleep(600)
    return 0


def main() -> None:
    """A launching process of its own, for tests that kill it: `python -m tests.support.entries FOLDER PORT`."""
    from dtf.launch import forkserver_cache
    from tests.support.launching import launch

    forkserver_cache.PRELOAD[:] = ["torch"]  # its ranks need no more
    launch("tests.support.entries:waits", Path(sys.argv[1]), config={"port": int(sys.argv[2])})


if __name__ == "__main__":
    main()
