"""Functions on several ranks, for tests: processes forked from a warm server, a gloo group on loopback, JSON results."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import time
import traceback
import uuid
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torchvision", "numpy", "tests.ranks"])


def ranks(count: int, target: str, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
    """Call `target` ("module:function") as `function(rank, size, **arguments)` on `count` ranks; their results by rank.

    Arguments and results are JSON. A gloo group spans the ranks. AssertionError with the traceback of the first rank that
    fails, or when a rank takes longer than `timeout_s`; no process is left either way.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port, prefix = listener.getsockname()[1], uuid.uuid4().hex
    text = json.dumps(arguments)
    processes, ends = [], []
    try:
        for rank in range(count):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            listening = listener if rank == 0 else None
            process = _CONTEXT.Process(target=_rank, args=(theirs, listening, port, prefix, rank, count, target, text), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(mine)
        return _collect(ends, time.monotonic() + timeout_s, target)
    finally:
        listener.close()
        for process in processes:
            process.kill()
            process.join()


def _collect(ends: list[Connection], deadline: float, target: str) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {end: rank for rank, end in enumerate(ends)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"{target}: rank {sorted(waiting.values())} took too long"
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                message = json.loads(end.recv_bytes())
            except EOFError:
                raise AssertionError(f"{target}: rank {rank} died without a word") from None
            assert "error" not in message, f"{target}: rank {rank} of {len(ends)} failed\n{message['error']}"
            results[rank] = message["result"]
    return [results[rank] for rank in range(len(ends))]


def _rank(end: Connection, listener: socket.socket | None, port: int, prefix: str, rank: int, size: int, target: str, text: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, size, listener is not None, master_listen_fd=listener.detach() if listener else None)
        dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=size)
        module, name = target.split(":")
        result = getattr(importlib.import_module(module), name)(rank, size, **json.loads(text))
        message = {"result": result}
        dist.barrier()
    except BaseException:
        message = {"error": traceback.format_exc()}
    end.send_bytes(json.dumps(message).encode())
