"""Functions on several ranks, for tests: processes forked from the warm server that runs use too, a gloo group on
loopback, JSON results.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtf.core.types import Event, Place
from dtf.host.signals import Stop
from dtf.launch import forkserver_cache
from dtf.launch.rank_handle import Limits
from dtf.launch.worker_group import WorkerGroup

if "tests.support.preload" not in forkserver_cache.PRELOAD:
    forkserver_cache.PRELOAD.append("tests.support.preload")


def ranks(count: int, target: str, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
    """Call `target` ("module:function") as `function(rank, size, **arguments)` on `count` ranks; their results by rank.

    Arguments and results are JSON. A gloo group spans the ranks. AssertionError with the traceback of the first rank
    that fails, or when a rank takes longer than `timeout_s`; no process is left either way.
    """
    with tempfile.TemporaryDirectory(prefix="dtf-ranks-") as folder:
        order = {
            "entry": "tests.support.ranks:call",
            "config": {"target": target, "arguments": arguments},
            "folder": folder,
            "run_id": uuid.uuid4().hex,
            "environment": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            "directory": os.getcwd(),
            "path": [os.path.abspath(part) for part in sys.path],
        }
        places = [
            Place(
                rank=rank, size=count, local_rank=rank, local_size=count, slots=count, threads=1, prefix=order["run_id"]
            )
            for rank in range(count)
        ]
        limits = Limits(hang_timeout_s=timeout_s, start_timeout_s=timeout_s, grace_s=0.0)
        with contextlib.closing(Stop()) as stop:  # not entered: Ctrl-C is pytest's
            outcome = WorkerGroup(
                forkserver_cache.fork_server({}),
                order,
                places,
                [[]] * count,
                Path(folder),
                limits,
                stop,
                lambda event: None,
            ).run()
        if outcome.cause:
            log = Path(folder, f"rank_{outcome.cause.rank}.log").read_text(errors="replace")
            raise AssertionError(
                f"{target}: rank {outcome.cause.rank} of {count}: "
                f"{outcome.cause.message}\n{outcome.cause.traceback}\nits log:\n{log[-4000:]}"
            )
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def call(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """Entry of a rank."""
    import torch.distributed as dist

    host, _, port = place.store.rpartition(":")
    store = dist.PrefixStore(place.prefix, dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    module, _, name = config["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(place.rank, place.size, **config["arguments"])
    Path(folder, f"{place.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    return 0
