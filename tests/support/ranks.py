"""Functions on several ranks, for tests: processes that wait for calls, a gloo group on loopback, JSON results.

One set of ranks of a size serves many tests, so that nothing is imported or connected anew.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import json
import os
import random
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Event, Failed, Note, Place, event_from_json
from dtf.host.heartbeat import Board
from dtf.launch import forkserver_cache
from dtf.launch.exit_cause import GroupResult
from dtf.launch.forkserver import ForkServer
from dtf.launch.rank_process import MESSAGE_BYTES
from dtf.launch.waits import WaitWatch

if "tests.support.preload" not in forkserver_cache.PRELOAD:
    forkserver_cache.PRELOAD.append("tests.support.preload")

MORE: list[str] = []
"""What the fork server of these ranks imports besides. Runs of the command line have another one."""

PATIENCE_S = 300.0
"""How long the fork server may be silent: it imports what its ranks need before it forks the first."""

REST_S = 1.0
"""How long the other ranks may take to refuse after the first. A set in which one took longer answers no more."""

CALLS = 50
"""What a set of ranks answers before another takes its place."""

_waiting: dict[int, RankSet] = {}
_numbers = itertools.count()  # of the processes of the fork server
_ended: dict[int, int] = {}  # status by number


def ranks(count: int, target: str, timeout_s: float = 60.0, shared: bool = False, **arguments: Any) -> list[Any]:
    """Call `target` ("module:function") as `function(rank, size, **arguments)` on `count` ranks; their results by rank.

    Arguments and results are JSON. A gloo group spans the ranks. `shared`: in processes that answered other calls and
    will answer more, for a function that leaves its process as it was. AssertionError with the traceback of the first
    rank that fails, or when a rank takes longer than `timeout_s`; these ranks are gone then.
    """
    chosen = (shared and _waiting.pop(count, None)) or RankSet(count)
    try:
        results = chosen.call(target, arguments, timeout_s)
    except Refused:
        chosen.rest(shared)
        raise
    except BaseException:
        chosen.end()
        raise
    chosen.rest(shared)
    return results


class Refused(AssertionError):
    """All ranks raised ConfigError, so that none waits for another."""


class RankSet:
    """Ranks that wait for calls, until `end` or the end of this process."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, 0
        self.numbers = [next(_numbers) for _ in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="dtf-ranks-"))
        self.lines, self.selector = [], selectors.DefaultSelector()
        order = {
            "entry": "tests.support.ranks:serve",
            "config": {"first": self.numbers[0]},
            "folder": str(self.folder),
            "run_id": "",
            **_surroundings(),
        }
        self.board = Board(self.numbers[-1] + 1)
        with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile() as shared:
            shared.write(json.dumps(order).encode())
            shared.flush()
            store = f"127.0.0.1:{listener.getsockname()[1]}"
            for rank in range(count):
                fds = [self.board.fd, shared.fileno(), *([] if rank else [listener.fileno()])]
                self.selector.register(self._start(rank, store, fds), selectors.EVENT_READ, rank)

    def _path(self, rank: int, kind: str) -> Path:
        return self.folder / f"{rank}.{kind}"

    def _start(self, rank: int, store: str, shared: list[int]) -> socket.socket:
        """Fork a rank; the channel on which it answers."""
        os.mkfifo(self._path(rank, "calls"))
        # also for reading: nobody waits for the other end
        self.lines.append(os.fdopen(os.open(self._path(rank, "calls"), os.O_RDWR), "w", buffering=1))
        place = Place(rank=self.numbers[rank], size=self.count, threads=1, store=store)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._path(rank, "log").open("ab") as log:
            _server().fork({"place": asdict(place), "pin": []}, [theirs.fileno(), log.fileno(), *shared])
        _hear("started", place.rank)
        return ours

    def call(self, target: str, arguments: dict[str, Any], timeout_s: float) -> list[Any]:
        """See `ranks`."""
        if self.calls:
            self._signal(signal.SIGCONT)
        self.calls += 1
        for rank, line in enumerate(self.lines):
            os.truncate(self._path(rank, "log"), 0)
            line.write(json.dumps({"target": target, "arguments": arguments, **_surroundings()}) + "\n")
        missing, until = set(range(self.count)), time.monotonic() + timeout_s
        failed: list[tuple[float, int, str]] = []
        while missing:
            heard = [self._hear(key.data, key.fileobj) for key, _ in self.selector.select(until - time.monotonic())]
            missing -= {rank for _, rank, _ in heard}
            failed = sorted([*failed, *(each for each in heard if each[2])])
            if not heard or any(not why.startswith(ConfigError.__name__) for _, _, why in failed):
                break
            if failed:
                until = min(until, time.monotonic() + REST_S)
        if failed or missing:
            _, rank, why = failed[0] if failed else (0.0, min(missing), f"no answer within {timeout_s:g} s")
            why = self._deadlock(rank, why) or why
            log = self._path(rank, "log").read_text(errors="replace")[-4000:]
            all_refused = not missing and all(why.startswith(ConfigError.__name__) for _, _, why in failed)
            kind = Refused if all_refused and len(failed) == self.count else AssertionError
            raise kind(f"{target}: rank {rank} of {self.count}: {why}\nits log:\n{log}")
        return [json.loads(self._path(rank, "json").read_text()) for rank in range(self.count)]

    def _deadlock(self, rank: int, why: str) -> str:
        """What the launcher says where ranks had entered different operations, after which gloo ends one of them."""
        if "exit status" not in why and "gloo" not in why:
            return ""
        cause = Failed(rank, 0, int(Exit.BUG), f"gloo: {why}", "")
        watch = WaitWatch(_Places(self.board, self.numbers[0]), lambda note: None)  # type: ignore[arg-type]
        result = watch.explain(GroupResult(Exit.BUG, cause), [*range(self.count)])
        return f"\nConfigError: {result.cause.message}" if result.exit is Exit.CONFIG and result.cause else ""

    def _signal(self, number: signal.Signals) -> None:
        for rank_number in self.numbers:
            _server().signal(rank_number, number)

    def _hear(self, rank: int, channel: Any) -> tuple[float, int, str]:
        """When a rank said something, its number, and why it failed, if it has."""
        data = channel.recv(MESSAGE_BYTES)
        if not data:
            _hear("ended", number := self.numbers[rank])
            return time.monotonic(), rank, f"ended with exit status {os.waitstatus_to_exitcode(_ended[number])}"
        message = json.loads(data)
        at, event = message.pop("at"), event_from_json(message)
        refused = f"{ConfigError.__name__}: " * (isinstance(event, Failed) and event.exit == Exit.CONFIG)
        return at, rank, f"{refused}{event.message}\n{event.traceback}" if isinstance(event, Failed) else ""

    def rest(self, shared: bool) -> None:
        """Wait for the next call, if there may be one."""
        if shared and self.calls < CALLS:
            self.pause()
            _waiting[self.count] = self
        else:
            self.end()

    def pause(self) -> None:
        """Stop the processes until the next call: each thread of gloo wakes a hundred times a second."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the processes, whatever they are doing."""
        self._signal(signal.SIGKILL)
        for line in self.lines:
            line.close()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        self.board.close()
        shutil.rmtree(self.folder)


class _Places:
    """The places of a set of ranks on a board, from 0 on as they count themselves."""

    def __init__(self, board: Board, first: int) -> None:
        self._board, self._first = board, first

    def read(self, rank: int) -> Any:
        return self._board.read(self._first + rank)

    def position(self, rank: int, last: int) -> Any:
        return self._board.position(self._first + rank, last)


@cache
def _server() -> ForkServer:
    """Not that of runs, which ends with some of them."""
    server = ForkServer([*forkserver_cache.PRELOAD, *MORE], {})
    atexit.register(server.close)
    atexit.register(lambda: [chosen.end() for chosen in _waiting.values()])
    return server


def _hear(what: str, number: int) -> None:
    """Wait until the fork server has said this of a process. AssertionError when it cannot fork any, or is silent."""
    while not (what == "ended" and number in _ended):
        assert select.select([_server().socket], [], [], PATIENCE_S)[0], f"the fork server has not {what} {number}"
        message = _server().receive()
        assert message and "error" not in message, f"the fork server of the tests ended: {message}"
        if "ended" in message:
            _ended[message["ended"]] = message["status"]
        elif what == "started" and message["started"] == number:
            return


def _surroundings() -> dict[str, Any]:
    """What a function finds around it is what surrounds its caller."""
    return {
        "environment": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        "directory": os.getcwd(),
        "path": [os.path.abspath(part) for part in sys.path],
    }


def serve(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """Entry of a rank: answer calls."""
    import torch.distributed as dist

    rank = place.rank - config["first"]
    host, _, port = place.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=place.size)
    with Path(folder, f"{rank}.calls").open() as calls:
        for line in calls:
            try:
                result = _answer(rank, place.size, **json.loads(line))
            except ConfigError as error:
                send(Failed(rank, 0, int(error.exit), str(error), traceback.format_exc()))
            else:
                Path(folder, f"{rank}.json").write_text(json.dumps(result))
                send(Note("info", "answered"))
            _free_groups()
    return 0


def _answer(
    rank: int,
    size: int,
    target: str,
    arguments: dict[str, Any],
    environment: dict[str, str],
    directory: str,
    path: list[str],
) -> Any:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:] = path
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(rank, size, **arguments)


def _free_groups() -> None:
    """Close the groups that a call left open: each has threads, one of which wakes a hundred times a second.

    But for those of device meshes, which DTensor keeps for the next tensors of such a shape.
    """
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh"):
            dist.destroy_process_group(group)
    gc.collect()
    gc.freeze()  # little stays after a call, and a set ends after CALLS: later collections need not look at it
