"""From the fork to the first line of a rank's own work: its log, signals, threads, store, and the channel for
events.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dtf.core.errors import DtfError, Exit, io_failure
from dtf.core.lossy_stream import lossy_stream
from dtf.core.submitted_code import as_submitted
from dtf.core.types import Event, Failed, Note, Place, event_to_json
from dtf.host import heartbeat

MESSAGE_BYTES = 1 << 17
"""The longest message on any of the sockets; the kernel takes 208 KiB without being asked."""

Entry = Callable[[dict[str, Any], str, str, Place, Callable[[Event], None]], int]
"""`entry(config, folder, run_id, place, send) -> exit code`, as `dtf.engine.train.work`."""


_ranks: list[int] = []


def is_rank() -> bool:
    """Whether this process was started as a rank."""
    return bool(_ranks)


def begin(order: dict[str, Any], fds: list[int]) -> int:
    """Set this freshly forked process up as a rank and run its entry; returns the exit code.

    `order`: {"place", "pin": cores or []}. `fds`: events, log, board, orders (a file of JSON shared by all ranks:
    entry, config, folder, run_id, environment, directory, path), store. The store is the file in which the ranks of one
    host meet. Where `order` has an address for it, it is the listening socket, which the rank that hosts it has alone.
    """
    events, log, board, orders, *store = fds
    place = Place.from_json(order["place"])
    _ranks.append(place.rank)
    hosts_store = bool(store and place.store)
    if store and not hosts_store:
        place = replace(place, store=f"/proc/self/fd/{store[0]}")
    post = sender(socket.socket(fileno=events))
    _redirect(log, place.rank, post)
    heartbeat.attach(board, place.rank)
    heartbeat.beat("start", 0)
    gc.enable()
    for number in (signal.SIGINT, signal.SIGHUP):
        # from the terminal to all processes; the launching one forwards a SIGTERM
        signal.signal(number, signal.SIG_IGN)
    with open(orders, "rb", closefd=False) as file:
        shared = json.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
    os.environ.clear()
    os.environ.update(shared["environment"])
    os.chdir(shared["directory"])
    sys.path[:] = shared["path"]
    as_submitted()
    send = with_log(post)
    try:
        import torch
        from torch.distributed import TCPStore

        if order["pin"]:  # after OpenMP, which binds the thread that loads it where a variable says so
            os.sched_setaffinity(0, order["pin"])
        torch.set_num_threads(place.threads)
        host, _, port = place.store.rpartition(":")
        hosted = (
            TCPStore(host, int(port), is_master=True, wait_for_workers=False, master_listen_fd=store[0])
            if hosts_store
            else None
        )
        code = int(entry(shared["entry"])(shared["config"], shared["folder"], shared["run_id"], place, send))
        del hosted
        heartbeat.end()
        return code
    except BaseException as error:  # noqa: BLE001  the launching process decides what to do
        error = io_failure(error, shared["folder"]) or error
        exit = error.exit if isinstance(error, DtfError) else Exit.BUG
        message = str(error) if isinstance(error, DtfError) else f"{type(error).__name__}: {error}"
        send(Failed(place.rank, 0, int(exit), message, traceback.format_exc(), error=type(error).__name__))
        return exit


def entry(name: str) -> Entry:
    """The function `module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def sender(channel: socket.socket) -> Callable[[Event], None]:
    """A function that sends an event as one message, with the time; any thread may call it."""
    lock = threading.Lock()

    def send(event: Event) -> None:
        if isinstance(event, Failed):
            event = replace(event, message=event.message[:2000], traceback=event.traceback[-16_000:])
        data = json.dumps({"at": time.monotonic(), **event_to_json(event)}).encode()
        if len(data) > MESSAGE_BYTES:
            raise DtfError(f"an event of {len(data)} bytes is too long to send; {MESSAGE_BYTES} at most")
        with lock:
            channel.send(data)

    return send


def with_log(post: Callable[[Event], None]) -> Callable[[Event], None]:
    """`post`, and then bad news goes to standard error too, the rank's log: what decides comes before what is kept."""

    def send(event: Event) -> None:
        post(event)
        if isinstance(event, Note) and event.level == "warning":
            print(f"dtf: warning: {event.text}", file=sys.stderr)
        if isinstance(event, Failed):
            print(event.traceback or event.message, file=sys.stderr)

    return send


def _redirect(log: int, rank: int, post: Callable[[Event], None]) -> None:
    """Everything this process prints goes to its log, C and C++ code included; SIGUSR1 and fatal signals add all
    stacks. A log that cannot be written fails nothing, and is told once by `post`.
    """
    told: list[OSError] = []

    def lost(error: OSError) -> None:
        if not told:
            told.append(error)
            post(Note("warning", f"rank_{rank}.log is cut short, the run goes on: {error.strerror}"))

    for fd in (1, 2):
        os.dup2(log, fd)
    sys.stdout, sys.stderr = (lossy_stream(fd, "utf-8", lost) for fd in (1, 2))
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
