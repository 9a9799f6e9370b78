"""One set of ranks from their start to the end of the last: watches, forwards stop signals, and says what ended them. Restarts nothing."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from dtf.ending import Ending, Outcome, innermost, outcome, preload_error
from dtf.errors import ORDERLY, Exit, PeerError
from dtf.forkserver import ForkServer
from dtf.heartbeat import Beat, Board
from dtf.launcher import Place
from dtf.rank import MESSAGE_BYTES
from dtf.values import Event, Failed, Saved, Started, event_from_json

_SETTLE_S = 0.5
"""After a first failure: time for the other ranks' words, which tell a cause from its consequences."""
_STACKS_S = 0.5
"""Between asking hung ranks for their stacks and killing them."""
_UNKILLABLE_S = 10.0
"""After SIGKILL, for what a rank is waiting for in the kernel."""
_REAP_S = 5.0
"""Until the server ends a rank or tells of its end. One that takes longer is stuck: it is killed, and its ranks with it."""


@dataclass(frozen=True)
class Limits:
    """Seconds of silence that mean a hang, and of patience with ranks asked to stop."""

    hang_timeout_s: float
    start_timeout_s: float
    grace_s: float

    def silence(self, beat: Beat) -> float:
        """How long a rank may stay at this beat. The first step of a process builds buckets and kernels: it has the time of a start."""
        return self.hang_timeout_s if beat.phase in ("fetch", "step", "log") and beat.steps > 1 else self.start_timeout_s


@dataclass
class _Rank:
    place: Place
    channel: socket.socket
    log: Path
    log_start: int  # bytes in the log before this attempt
    pid: int = 0
    status: int | None = None  # as of os.waitpid; None while it lives
    killed: bool = False  # by us
    failed: Failed | None = None  # its own last words
    at: float = 0.0  # when it said them
    silent_since: float = 0.0  # it closed its channel: it ended, though the server has not said so
    stopped_since: float = 0.0  # found stopped by a signal at every look since then

    def printed(self) -> str:
        """What it printed in this attempt, the last 64 KiB."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, self.log.stat().st_size - (1 << 16)))
                return file.read().decode(errors="replace")
        except OSError:  # somebody removed the run folder
            return ""

    def state(self) -> str:
        """Its state as the kernel shows it: R running, S waiting, D in the kernel, T stopped; empty when it is gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""


_ONE_SIGNAL_S = 0.2
"""Signals closer than this are one: `timeout` and schedulers signal a process and then its whole group."""


class Stop:
    """Counts SIGTERM, SIGINT and SIGHUP while it is open. `socket` becomes readable at each. Outside the main thread it hears nothing."""

    def __init__(self) -> None:
        self.count, self._last = 0, -_ONE_SIGNAL_S
        self.socket, self._waker = socket.socketpair()

    def __enter__(self) -> Self:
        self._old: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            try:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._old[number] = signal.signal(number, self._heard)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self.close()

    def close(self) -> None:
        self.socket.close()
        self._waker.close()

    def _heard(self, number: int, frame: object) -> None:
        now, before = time.monotonic(), self._last
        self._last = now
        if now - before < _ONE_SIGNAL_S:
            return
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!", socket.MSG_DONTWAIT)


class Others(Protocol):
    """The other hosts of an attempt, see `hosts.Hosts`."""

    failed: Failed | None  # what has happened there, so that the ranks here have to end

    def fileno(self) -> int: ...  # readable when there is something to hear
    def hear(self) -> None: ...
    def tick(self) -> None: ...  # called at least once a second
    def begin(self, number: int, store: str) -> None: ...
    def settle(self, mine: Outcome) -> Outcome: ...  # of all hosts


@dataclass
class Attempt:
    """Ranks at `places`, forked by `server` with the shared part `order` (see `rank.begin`). `run` may be called once.

    They meet at `store`; rank 0, if it is here, hosts it on `listener`. Without: on loopback, all ranks are here.
    """

    server: ForkServer
    order: dict[str, Any]
    places: list[Place]
    pins: list[list[int]]
    folder: Path
    limits: Limits
    stop: Stop
    see: Callable[[Event], None]
    store: str = ""
    listener: socket.socket | None = None
    others: Others | None = None
    saved: bool = False  # a checkpoint was written
    resumed: bool = False  # the ranks started from a checkpoint
    _ranks: list[_Rank] = field(default_factory=list)
    _stopping_since: float = 0.0
    _failing_since: float = 0.0
    _hang: Failed | None = None
    _hang_since: float = 0.0
    _killed_since: float = 0.0
    _awake_since: float = 0.0  # beats before this moment say nothing: this process itself slept

    def run(self) -> Outcome:
        """Start the ranks and return when all have ended. ConfigError or DtfError when the server cannot start any."""
        self._first = self.places[0].rank
        self._board = Board(self._first + len(self.places))
        self._selector = selectors.DefaultSelector()
        listener = self.listener if self.store else socket.create_server(("127.0.0.1", 0), backlog=1024)
        orders = os.memfd_create("dtf-order")
        try:
            store = self.store or f"127.0.0.1:{listener.getsockname()[1] if listener else 0}"
            if self.others:
                self.others.begin(self.places[0].attempt, store)
                self._selector.register(self.others, selectors.EVENT_READ, self.others.hear)
            with open(orders, "wb", closefd=False) as file:
                file.write(json.dumps(self.order).encode())
            self._selector.register(self.server.socket, selectors.EVENT_READ, self._on_server)
            self._selector.register(self.stop.socket, selectors.EVENT_READ, lambda: self.stop.socket.recv(64))
            for place, pin in zip(self.places, self.pins, strict=True):
                self._start(Place(**{**asdict(place), "store": store}), pin, [self._board.fd, orders], listener if place.rank == 0 else None)
            if listener:
                listener.close()
            self._watch()
            return self.others.settle(self._outcome()) if self.others else self._outcome()
        except BaseException:
            self.server.close()  # and with it every rank; a later attempt shall not hear of them
            raise
        finally:
            if listener:
                listener.close()
            os.close(orders)
            self._selector.close()
            for rank in self._ranks:
                rank.channel.close()
            self._board.close()

    def _start(self, place: Place, pin: list[int], shared: list[int], listener: socket.socket | None) -> None:
        path = self.folder / f"rank_{place.rank}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if place.attempt:
            os.write(log, f"---- attempt {place.attempt}\n".encode())
        rank = _Rank(place, ours, path, os.fstat(log).st_size)
        self._ranks.append(rank)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._on_event(rank))
        with theirs:
            fds = [theirs.fileno(), log, *shared, *([listener.fileno()] if listener else [])]
            self.server.fork({"place": asdict(place), "pin": pin}, fds)
        os.close(log)

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        tick = min(1.0, self.limits.hang_timeout_s / 4)
        last = time.monotonic()
        while self._alive():
            for key, _ in self._selector.select(self._wait(tick)):
                key.data()
            now = time.monotonic()
            if now - last > tick + 1.0:
                self._awake_since = now
            last = now
            if self.others:
                self.others.tick()
                if self.others.failed and not self._failing_since:
                    self._failing_since = now
            if self._alive():
                self._act(now)

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.status is None]

    def _wait(self, tick: float) -> float:
        """Seconds until something falls due, at most a tick."""
        due = [since + after for since, after in ((self._failing_since, _SETTLE_S), (self._hang_since, _STACKS_S)) if since and not self._killed_since]
        if self._stopping_since and not self._killed_since:
            due.append(self._stopping_since + self.limits.grace_s)
        return max(0.0, min([tick, *(at - time.monotonic() for at in due)]))

    def _act(self, now: float) -> None:
        if self.stop.count and not self._stopping_since:
            self._stopping_since = now
            if self.others or not all(self._starting(rank) for rank in self._ranks):
                self._signal(signal.SIGTERM)
            else:  # nothing to save, and importing or meeting may take longer than the grace
                self._kill(now)
        if any(rank.silent_since and now - rank.silent_since > _REAP_S for rank in self._alive()):
            self._lose_server()
        elif self._killed_since:
            waited, stuck = now - self._killed_since, [rank.pid for rank in self._alive() if rank.state() == "D"]
            if stuck and waited > _UNKILLABLE_S:
                raise PeerError(f"processes {stuck} do not end {_UNKILLABLE_S:.0f} s after SIGKILL; a device or a file system is stuck; restart this host")
            if not stuck and waited > _REAP_S:
                self._lose_server()
        elif self.stop.count > 1 or (self._stopping_since and now - self._stopping_since >= self.limits.grace_s):
            self._kill(now)
        elif self._failing_since:
            if now - self._failing_since >= _SETTLE_S or any(rank.status and rank.status & 0x7F and not rank.killed for rank in self._ranks):
                self._kill(now)  # after a death by signal nobody needs to say more
        elif self._hang:
            if now - self._hang_since >= _STACKS_S:
                self._hang = self._describe_hang(self._hang, now)
                self._kill(now)
        else:
            self._look_for_hang(now)

    def _starting(self, rank: _Rank) -> bool:
        return self._board.read(rank.place.rank).phase == "start"

    def _look_for_hang(self, now: float) -> None:
        alive = self._alive()
        beats = {rank.place.rank: self._board.read(rank.place.rank) for rank in alive}
        for rank in alive:
            rank.stopped_since = (rank.stopped_since or now) if rank.state() == "T" else 0.0  # not "t": a debugger stops it and goes on
        if any(self._hangs(rank, beats[rank.place.rank], now) for rank in alive):
            stopped = [rank.place.rank for rank in alive if rank.state() in ("T", "t")]
            number = min(stopped or beats, key=lambda each: (beats[each].step, beats[each].at))  # the one the others wait for
            self._hang = Failed(number, beats[number].step, int(Exit.PEER), "", "")
            self._hang_since = now
            self._signal(signal.SIGUSR1)  # stacks into the logs

    def _hangs(self, rank: _Rank, beat: Beat, now: float) -> bool:
        """Whether it has been silent for longer than its phase may take, or stopped by a signal, which no phase explains."""
        heard = max(beat.at, self._awake_since)
        stopped_s = now - max(heard, rank.stopped_since) if rank.stopped_since else 0.0  # one that beats between stops is only slow
        return now - heard > self.limits.silence(beat) or stopped_s > self.limits.hang_timeout_s

    def _describe_hang(self, hang: Failed, now: float) -> Failed:
        """A hang with its message: where each rank is, with the line it stands in from the stacks it has written since."""
        told = []
        for rank in self._alive():
            beat, state, where = self._board.read(rank.place.rank), rank.state(), innermost(rank.printed())
            text = f"rank {rank.place.rank}: phase {beat.phase}, step {beat.step}, silent for {now - max(beat.at, self._awake_since):.1f} s"
            told.append(text + (", stopped by a signal" if state in ("T", "t") else f", at {where}" if where else ""))
        limits = f"launcher.hang_timeout_s={self.limits.hang_timeout_s:g}, launcher.start_timeout_s={self.limits.start_timeout_s:g}"
        return Failed(hang.rank, hang.step, hang.exit, f"no sign of life within {limits}; {'; '.join(told)}; stacks are in {self.folder}/rank_*.log", "")

    def _signal(self, number: int) -> None:
        for rank in self._alive():
            self.server.signal(rank.place.rank, number)

    def _kill(self, now: float) -> None:
        self._killed_since = now
        for rank in self._alive():
            rank.killed = True
        if all(rank.pid for rank in self._ranks):
            self._signal(signal.SIGKILL)
        else:
            self._lose_server()  # still importing: it would not hear of it soon

    # ------------------------------------------------------------ what arrives

    def _on_server(self) -> None:
        message = self.server.receive()
        if message is None:
            self._lose_server()
        elif "error" in message:
            raise preload_error(message["error"], message["traceback"])
        elif "started" in message:
            self._ranks[message["started"] - self._first].pid = message["pid"]
        else:
            self._end(self._ranks[message["ended"] - self._first], message["status"])

    def _lose_server(self) -> None:
        """The server is dead, or as good as that: end it, and with it the ranks."""
        self._selector.unregister(self.server.socket)
        self.server.close()
        for rank in self._alive():
            self._end(rank, signal.SIGKILL)

    def _end(self, rank: _Rank, status: int) -> None:
        while self._on_event(rank):  # its last words may still be on the way
            pass
        rank.status = status
        if status and os.waitstatus_to_exitcode(status) not in ORDERLY and not rank.killed and not self._failing_since:
            self._failing_since = time.monotonic()

    def _on_event(self, rank: _Rank) -> bool:
        """Take one message of a rank; False when there is none now or will be none."""
        try:
            data = rank.channel.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            if not rank.silent_since:
                rank.silent_since = time.monotonic()
                self._selector.unregister(rank.channel)
                self.server.wake()
            return False
        message = json.loads(data)
        at = message.pop("at")
        event = event_from_json(message)
        if isinstance(event, Failed):
            if not rank.failed:
                rank.failed, rank.at = event, at
                if event.exit not in ORDERLY and not self._failing_since:
                    self._failing_since = time.monotonic()
        else:
            self.saved = self.saved or isinstance(event, Saved)
            self.resumed = self.resumed or (isinstance(event, Started) and event.step > 0)
            self.see(event)
        return True

    def _outcome(self) -> Outcome:
        endings = []
        for rank in self._ranks:
            step = self._board.read(rank.place.rank).step
            endings.append(Ending(rank.place.rank, step, self._starting(rank), rank.status or 0, rank.killed, rank.failed, rank.at, rank.printed()))
        return outcome(endings, self._hang, self.stop.count, self.others.failed if self.others else None)
