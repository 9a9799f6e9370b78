"""What the ranks of `job=doctor` do: measure the network between them, and the differences of their clocks.

Rank 0 writes the measurements of all into the run folder.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtf.config.settings import parse_settings
from dtf.core.types import Event, Place
from dtf.distributed.world import World
from dtf.host.devices import cores

RESULT = "doctor.json"
_PINGS, _ROUNDS = 20, 3
_RUN_FOLDER = "found-by-{}"


def examine(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`."""
    settings = parse_settings(config)
    kind, megabytes = place.device.partition(":")[0], config["job"]["megabytes"]
    alike = len(settings.strategy.roles(place.slots)) == 1
    world = World.join(place, (settings.strategy.communication(kind) if alike else None) or "gloo")
    seen = Path(folder, _RUN_FOLDER.format(place.rank))
    with suppress(OSError):
        seen.touch()
    world.barrier()
    facts = {
        "host": socket.gethostname(),
        "local_rank": place.local_rank,
        "device": torch.cuda.get_device_name(place.device) if kind == "cuda" else "cpu",
        "cores": cores(),
        "threads": place.threads,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "backend": str(dist.get_backend()) if world.size > 1 else "",
    }
    ranks = world.broadcast(world.gather(facts))
    first_ranks = [rank for rank, rank_facts in enumerate(ranks) if rank_facts["local_rank"] == 0]
    chosen = first_ranks if len(first_ranks) > 1 else list(range(world.size))
    pairs = list(itertools.pairwise(chosen))
    if len(chosen) > 2:
        pairs.append((chosen[-1], chosen[0]))
    result = {
        "ranks": ranks,
        "missing": [rank for rank in range(world.size) if not Path(folder, _RUN_FOLDER.format(rank)).exists()],
        "clocks": [_clock(world, rank) for rank in chosen[1:]],
        "links": [_link(world, source, target, megabytes) for source, target in pairs],
        "all_reduce_mb_s": _all_reduce(world, megabytes),
        "megabytes": megabytes,
    }
    measured = world.gather({"clocks": result["clocks"], "links": result["links"]})
    if measured is not None:
        for name in ("clocks", "links"):  # each was measured by one rank of its pair
            result[name] = [
                next(part[name][at] for part in measured if part[name][at]) for at in range(len(result[name]))
            ]
        Path(folder, RESULT).write_text(json.dumps(result))
    world.barrier()
    world.leave()
    return 0


def _clock(world: World, other: int) -> dict[str, Any]:
    """Seconds by which the clock of `other` is ahead of rank 0's, from the quickest of many round trips. Half of that
    round trip is the uncertainty. Rank 0 returns the result, other ranks an empty dict.
    """
    best = (float("inf"), 0.0)
    buffer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        if world.rank == 0:
            sent = time.time()
            dist.send(buffer, other)
            dist.recv(buffer, other)
            took = time.time() - sent
            best = min(best, (took, float(buffer) - sent - took / 2))
        elif world.rank == other:
            dist.recv(buffer, 0)
            buffer.fill_(time.time())
            dist.send(buffer, 0)
    return {"rank": other, "ahead_s": best[1], "round_trip_s": best[0]} if world.rank == 0 else {}


def _link(world: World, source: int, target: int, megabytes: int) -> dict[str, Any]:
    """MB/s from one rank to another over the CPU backend, the best of a few rounds. Only the source returns it."""
    best, answer = 0.0, torch.zeros(1)
    if world.rank not in (source, target):
        return {}
    data = torch.zeros(megabytes * 1_000_000, dtype=torch.uint8)
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        if world.rank == source:
            dist.send(data, target)
            dist.recv(answer, target)
            best = max(best, megabytes / (time.perf_counter() - begun))
        else:
            dist.recv(data, source)
            dist.send(answer, source)
    return {"from": source, "to": target, "mb_s": best} if world.rank == source else {}


def _all_reduce(world: World, megabytes: int) -> float:
    """MB/s at which an all-reduce sums a gradient of this size over all ranks, on their device; 0 for one rank."""
    if world.size == 1:
        return 0.0
    data = torch.zeros(megabytes * 250_000, device=world.device)
    best = 0.0
    for _ in range(_ROUNDS + 1):  # the first one makes connections
        world.barrier()
        begun = time.perf_counter()
        dist.all_reduce(data)
        data[0].item()  # waits for it
        best = max(best, megabytes / (time.perf_counter() - begun))
    return best
