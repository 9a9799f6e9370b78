"""One set of ranks from their start to the end of the last: watches, forwards stop signals, and says what ended them.

Restarts nothing.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dtf.core.errors import PLANNED_EXITS, Exit, PeerError
from dtf.core.types import Event, Failed, Note, Place, Saved, Started, event_from_json
from dtf.host.heartbeat import Beat, Board
from dtf.host.signals import Stop
from dtf.launch.exit_cause import Ending, Outcome, innermost, outcome, preload_error
from dtf.launch.forkserver import ForkServer
from dtf.launch.rank_process import MESSAGE_BYTES

_SETTLE_S = 0.5
"""After a first failure: time for the other ranks' words, which tell a cause from its consequences."""
_STACKS_S = 0.5
"""Between asking hung ranks for their stacks and killing them."""
_UNKILLABLE_S = 10.0
"""After SIGKILL, for what a rank is waiting for in the kernel."""
_REAP_S = 5.0
"""Until the server ends a rank or tells of its end.

One that takes longer is stuck: it is killed, and its ranks with it.
"""


@dataclass(frozen=True)
class Limits:
    """Seconds of silence that mean a hang, and of patience with ranks asked to stop."""

    hang_timeout_s: float
    start_timeout_s: float
    grace_s: float

    def silence(self, beat: Beat) -> float:
        """How long a rank may stay at this beat.

        The first step of a process builds buckets and kernels: it has the time of a start.
        """
        return (
            self.hang_timeout_s if beat.phase in ("fetch", "step", "log") and beat.steps > 1 else self.start_timeout_s
        )


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
    hung_since: float = 0.0  # found to hang, and asked for its stacks, to be replaced
    hang: str = ""  # killed for it: what was seen
    replaced: int = 0  # how often its place was, since a process there finished a step

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


class Others(Protocol):
    """The other hosts of an attempt, see `host_rendezvous.Hosts`."""

    failed: Failed | None  # what has happened there, so that the ranks here have to end

    def fileno(self) -> int: ...  # readable when there is something to hear
    def hear(self) -> None: ...
    def tick(self) -> None: ...  # called at least once a second
    def begin(self, number: int, store: str) -> None: ...
    def settle(self, mine: Outcome) -> Outcome: ...  # of all hosts


@dataclass
class Attempt:
    """Ranks at `places`, forked by `server` with the shared part `order` (see `rank_process.begin`). `run` may be
    called once.

    They meet at `store`; rank 0, if it is here, hosts it on `listener`. Without: on loopback, all ranks are here. A
    lost rank of the roles `replaceable` is started again alone, `max_restarts` times in a row unless it finishes a
    step; all others end the attempt with them.
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
    replaceable: frozenset[str] = frozenset()
    max_restarts: int = 0
    saved: bool = False  # a checkpoint was written
    resumed: bool = False  # the ranks started from a checkpoint
    _ranks: list[_Rank] = field(default_factory=list)
    _stopping_since: float = 0.0
    _failing_since: float = 0.0
    _hang: Failed | None = None
    _hang_since: float = 0.0
    _killed_since: float = 0.0
    _unled_until: float = 0.0
    _awake_since: float = 0.0  # beats before this moment say nothing: this process itself slept

    def run(self) -> Outcome:
        """Start the ranks and return when all have ended. ConfigError or DtfError when the server cannot start any."""
        self._first = self.places[0].rank
        self._board = Board(self._first + len(self.places))
        self._selector = selectors.DefaultSelector()
        listener = self.listener if self.store else socket.create_server(("127.0.0.1", 0), backlog=1024)
        orders = os.memfd_create("dtf-order")
        self._shared = [self._board.fd, orders]
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
                self._ranks.append(self._start(replace(place, store=store), pin, listener if place.rank == 0 else None))
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

    def _start(self, place: Place, pin: list[int], listener: socket.socket | None = None) -> _Rank:
        path = self.folder / f"rank_{place.rank}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if place.attempt or place.retry:
            os.write(
                log,
                "---- attempt "
                f"{place.attempt}{f', started again alone: {place.retry}' if place.retry else ''}\n".encode(),
            )
        rank = _Rank(place, ours, path, os.fstat(log).st_size)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._on_event(rank))
        with theirs:
            fds = [theirs.fileno(), log, *self._shared, *([listener.fileno()] if listener else [])]
            self.server.fork({"place": asdict(place), "pin": pin}, fds)
        os.close(log)
        return rank

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

    def _unled(self) -> bool:
        """Whether all have ended whose end is that of the run; replaceable ones have nothing left to do."""
        return all(rank.status is not None for rank in self._ranks if rank.place.role not in self.replaceable)

    def _wait(self, tick: float) -> float:
        """Seconds until something falls due, at most a tick."""
        grace_s = self.limits.grace_s
        waits = (
            (self._failing_since, _SETTLE_S),
            (self._hang_since, _STACKS_S),
            (self._stopping_since, grace_s),
            (self._unled_until, 0.0),
        )
        due = [since + after for since, after in waits if since and not self._killed_since]
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
                raise PeerError(
                    f"processes {stuck} do not end {_UNKILLABLE_S:.0f} s after SIGKILL; a device or a file system is "
                    "stuck; restart this host"
                )
            if not stuck and waited > _REAP_S:
                self._lose_server()
        elif self.stop.count > 1 or (self._stopping_since and now - self._stopping_since >= self.limits.grace_s):
            self._kill(now)
        elif self._failing_since:
            if now - self._failing_since >= _SETTLE_S or any(
                rank.status and rank.status & 0x7F and not rank.killed for rank in self._ranks
            ):
                self._kill(now)  # after a death by signal nobody needs to say more
        elif self._unled():
            self._unled_until = self._unled_until or now + min(self.limits.grace_s, self.limits.hang_timeout_s)
            if now >= self._unled_until or all(self._starting(rank) for rank in self._alive()):
                self._kill(now)
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
            # not "t": a debugger stops it and goes on
            rank.stopped_since = (rank.stopped_since or now) if rank.state() == "T" else 0.0
        hung = [rank for rank in alive if self._hangs(rank, beats[rank.place.rank], now)]
        if all(self._may_replace(rank) for rank in hung):
            for rank in alive:
                if rank in hung:
                    self._end_hung(rank, now)
                else:
                    rank.hung_since = 0.0
        else:
            stopped = [rank.place.rank for rank in alive if rank.state() in ("T", "t")]
            # the one the others wait for
            number = min(
                stopped or beats, key=lambda each: (beats[each].phase == "wait", beats[each].step, beats[each].at)
            )
            self._hang = Failed(number, beats[number].step, int(Exit.PEER), "", "")
            self._hang_since = now
            self._signal(signal.SIGUSR1)  # stacks into the logs

    def _hangs(self, rank: _Rank, beat: Beat, now: float) -> bool:
        """Whether it has been silent for longer than its phase may take, or stopped by a signal, which no phase
        explains.
        """
        heard = max(beat.at, self._awake_since)
        # one that beats between stops is only slow
        stopped_s = now - max(heard, rank.stopped_since) if rank.stopped_since else 0.0
        return now - heard > self.limits.silence(beat) or stopped_s > self.limits.hang_timeout_s

    def _describe_hang(self, hang: Failed, now: float) -> Failed:
        """A hang with its message: where each rank is, with the line it stands in from the stacks it has written
        since.
        """
        told = [f"rank {rank.place.rank}: {self._whereabouts(rank, now)}" for rank in self._alive()]
        message = (
            f"no sign of life within {self._silences()}; {'; '.join(told)}; stacks are in {self.folder}/rank_*.log"
        )
        return Failed(hang.rank, hang.step, hang.exit, message, "")

    def _silences(self) -> str:
        return (
            f"launcher.hang_timeout_s={self.limits.hang_timeout_s:g}, "
            f"launcher.start_timeout_s={self.limits.start_timeout_s:g}"
        )

    def _whereabouts(self, rank: _Rank, now: float) -> str:
        beat, state, where = self._board.read(rank.place.rank), rank.state(), innermost(rank.printed())
        text = f"phase {beat.phase}, step {beat.step}, silent for {now - max(beat.at, self._awake_since):.1f} s"
        return text + (", stopped by a signal" if state in ("T", "t") else f", at {where}" if where else "")

    def _signal(self, number: int) -> None:
        for rank in self._alive():
            self.server.signal(rank.place.rank, number)

    def _kill(self, now: float) -> None:
        self._killed_since = now
        for rank in self._alive():
            rank.killed = True
        if any(rank.pid for rank in self._ranks):
            self._signal(signal.SIGKILL)
        else:
            self._lose_server()  # still importing: it would not hear of it soon

    # ------------------------------------------------------------ ranks that hold nothing

    def _may_replace(self, rank: _Rank) -> bool:
        return rank.place.role in self.replaceable and self._replaced(rank) < self.max_restarts

    def _replaced(self, rank: _Rank) -> int:
        return 0 if self._board.read(rank.place.rank).steps > 1 else rank.replaced

    def _end_hung(self, rank: _Rank, now: float) -> None:
        """Have it write its stacks, then kill it; what cannot be killed ends the attempt."""
        if not rank.hung_since:
            rank.hung_since = now
            self.server.signal(rank.place.rank, signal.SIGUSR1)
        elif now - rank.hung_since > _UNKILLABLE_S:
            self._failing_since = now
        elif not rank.hang and now - rank.hung_since >= _STACKS_S:
            rank.hang = (
                f"no sign of life within {self._silences()}; {self._whereabouts(rank, now)}; stacks are in {rank.log}"
            )
            self.server.signal(rank.place.rank, signal.SIGKILL)

    def _lose(self, rank: _Rank, why: str) -> None:
        """One of a replaceable role has ended from outside: start it again alone, unless nobody needs it any more, or
        it does not help.
        """
        if self._stopping_since or self.stop.count or self._unled():
            rank.killed = True  # as good as: it would have been
        elif self._hang or not self._may_replace(rank):
            self._failing_since = time.monotonic()
        else:
            if not rank.silent_since:  # a process that it started has the channel too
                self._selector.unregister(rank.channel)
            rank.channel.close()
            place, at, before = rank.place, rank.place.rank - self._first, self._replaced(rank)
            step = self._board.read(place.rank).step
            self._board.reset(place.rank)
            self._ranks[at] = self._start(replace(place, retry=place.retry + 1), self.pins[at])
            self._ranks[at].replaced = before + 1
            told = f"it alone is started again, {before + 1} of {self.max_restarts}"
            self.see(Note("warning", f"rank {place.rank} ({place.role} {place.number}) at step {step}: {why}; {told}"))

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
        self._failing_since = self._failing_since or time.monotonic()  # nobody is replaced
        self._selector.unregister(self.server.socket)
        self.server.close()
        for rank in self._alive():
            self._end(rank, signal.SIGKILL)

    def _end(self, rank: _Rank, status: int) -> None:
        while self._on_event(rank):  # its last words may still be on the way
            pass
        rank.status = status
        if not status or os.waitstatus_to_exitcode(status) in PLANNED_EXITS or rank.killed or self._failing_since:
            return
        alone = outcome([self._ending(rank)], None, 0)
        if rank.place.role in self.replaceable and alone.external and alone.cause:
            self._lose(rank, rank.hang or alone.cause.message)
        else:
            self._failing_since = time.monotonic()

    def _on_event(self, rank: _Rank) -> bool:
        """Take one message of a rank; False when there is none now or will be none."""
        if rank.channel.fileno() < 0:  # replaced since it was found to be readable
            return False
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
                # it may have lost one that is about to be missed
                alone = event.exit == Exit.PEER and rank.place.role in self.replaceable
                if event.exit not in PLANNED_EXITS and not alone and not self._failing_since:
                    self._failing_since = time.monotonic()
        else:
            self.saved = self.saved or isinstance(event, Saved)
            self.resumed = self.resumed or (isinstance(event, Started) and event.step > 0)
            self.see(event)
        return True

    def _outcome(self) -> Outcome:
        return outcome(
            [self._ending(rank) for rank in self._ranks],
            self._hang,
            self.stop.count,
            self.others.failed if self.others else None,
        )

    def _ending(self, rank: _Rank) -> Ending:
        number, status, alone = rank.place.rank, rank.status or 0, rank.place.role in self.replaceable
        return Ending(
            number,
            self._board.read(number).step,
            self._starting(rank),
            status,
            rank.killed,
            rank.failed,
            rank.at,
            rank.printed(),
            alone,
        )
