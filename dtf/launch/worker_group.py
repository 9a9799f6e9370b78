"""One attempt's ranks on this host, from their start to the end of the last.

Watches them, forwards stop signals, replaces single ranks where a strategy allows it, and finds out what ended them.
Restarts of the whole group are `restart_policy`'s.
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
from typing import Any

from dtf.core.errors import PLANNED_EXITS, Exit, PeerError
from dtf.core.types import Event, Failed, Note, Place, Saved, Started, Stepped, event_from_json
from dtf.host.heartbeat import Beat, Board
from dtf.host.signals import Stop, what_insists
from dtf.launch.exit_cause import GroupResult, RankExit, group_result, last_frame, preload_error
from dtf.launch.forkserver import ForkServer
from dtf.launch.rank_handle import Limits, OtherHosts, RankHandle, open_log, waited_for
from dtf.launch.rank_process import MESSAGE_BYTES
from dtf.launch.recovery import Loss, recovered
from dtf.launch.waits import WaitWatch

_SETTLE_S = 0.5
"""After a first failure, for the messages of other ranks: they tell a cause from its consequences."""
_STACKS_S = 0.5
"""Between asking hung ranks for their stacks and killing them."""
_UNKILLABLE_S = 10.0
"""After SIGKILL, for what a rank is waiting for in the kernel."""
_REAP_S = 5.0
"""Until the fork server ends a rank, or reports its end. A server that takes longer is killed with its ranks."""


@dataclass
class WorkerGroup:
    """Ranks at `places`, forked by `server`. `run` may be called once.

    `order`: what they share, see `rank_process.begin`. `pins`: the cores of each, empty: the server's. `store`:
    HOST:PORT of the rendezvous store, which rank 0, if it is on this host, serves on `listener`; empty when all ranks
    are on this host: then it is a file in memory, which they inherit and no other user can open. A lost rank of a role
    in `replaceable` is started again alone, up to `max_restarts` times in a row unless it finishes a step; the loss of
    any other rank ends the attempt.
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
    others: OtherHosts | None = None
    replaceable: frozenset[str] = frozenset()
    max_restarts: int = 0
    saved: bool = False  # a checkpoint was written
    resumed: bool = False  # the ranks started from a checkpoint
    loss: Loss = Loss(0.0, 0.0, 0.0)  # after `run`, when ranks were lost
    _ranks: list[RankHandle] = field(default_factory=list)
    _stopping_since: float = 0.0
    _failing_since: float = 0.0
    _hang: Failed | None = None
    _hang_since: float = 0.0
    _killed_since: float = 0.0
    _helpers_until: float = 0.0
    _awake_since: float = 0.0  # beats before this moment say nothing: this process slept, or a rank compiled

    def run(self) -> GroupResult:
        """Start the ranks and return when all have ended. ConfigError or DtfError when the server cannot start any."""
        self._first = self.places[0].rank
        self._board = Board(self._first + len(self.places))
        self._waits = WaitWatch(self._board, self.see)
        self._selector = selectors.DefaultSelector()
        orders = os.memfd_create("dtf-order")
        self._shared = [self._board.fd, orders]
        if not self.store:
            self._shared.append(os.memfd_create("dtf-store"))
        try:
            if self.others:
                self.others.begin_attempt(self.places[0].attempt, self.store)
                self._selector.register(self.others, selectors.EVENT_READ, self.others.receive)
            with open(orders, "wb", closefd=False) as file:
                file.write(json.dumps(self.order).encode())
            self._selector.register(self.server.socket, selectors.EVENT_READ, self._on_server)
            self._selector.register(self.stop.socket, selectors.EVENT_READ, lambda: self.stop.socket.recv(64))
            for place, pin in zip(self.places, self.pins, strict=True):
                place, listener = replace(place, store=self.store), None if place.rank else self.listener
                self._ranks.append(self._start(place, pin, listener))
            if self.listener:
                self.listener.close()
            self._watch()
            return self.others.report_result(self._result()) if self.others else self._result()
        except BaseException:
            self.server.close()  # and with it every rank, so that a later attempt hears nothing of them
            raise
        finally:
            if self.listener:
                self.listener.close()
            for fd in self._shared[1:]:
                os.close(fd)
            self._selector.close()
            for rank in self._ranks:
                rank.channel.close()
            self._board.close()

    def _start(self, place: Place, pin: list[int], listener: socket.socket | None = None) -> RankHandle:
        path = self.folder / f"rank_{place.rank}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = open_log(path, place, self.see)
        rank = RankHandle(place, ours, path, os.fstat(log).st_size)
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
            self.server.wake()  # who stopped it may do so again after each request
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

    def _alive(self) -> list[RankHandle]:
        return [rank for rank in self._ranks if rank.status is None]

    def _only_helpers_left(self) -> bool:
        """Whether all ranks have ended but replaceable ones, which have nothing left to do."""
        return all(rank.status is not None for rank in self._ranks if rank.place.role not in self.replaceable)

    def _wait(self, tick: float) -> float:
        """Seconds until the next deadline, at most `tick`."""
        grace_s = self.limits.grace_s
        waits = (
            (self._failing_since, _SETTLE_S),
            (self._hang_since, _STACKS_S),
            (self._stopping_since, grace_s),
            (self._helpers_until, 0.0),
        )
        due = [since + after for since, after in waits if since and not self._killed_since]
        return max(0.0, min([tick, *(at - time.monotonic() for at in due)]))

    def _act(self, now: float) -> None:
        if self.stop.count and not self._stopping_since:
            self._stopping_since = now
            if self.others or not all(self._starting(rank) for rank in self._ranks):
                grace = f"within {self.limits.grace_s:g} s (launcher.grace_s); a second {what_insists()} kills them at"
                self.see(Note("info", f"asked to stop: ranks finish their step, save and leave, {grace} once"))
                self._signal(signal.SIGTERM)
            else:  # nothing to save, and a start may take longer than the grace
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
                self._kill(now)  # after a death by signal no message is waited for
        elif self._only_helpers_left():
            self._helpers_until = self._helpers_until or now + min(self.limits.grace_s, self.limits.hang_timeout_s)
            if now >= self._helpers_until or all(self._starting(rank) for rank in self._alive()):
                self._kill(now)
        elif self._hang:
            if now - self._hang_since >= _STACKS_S:
                self._hang = self._describe_hang(self._hang, now)
                self._kill(now)
        elif stuck := self._waits.look([rank.place.rank for rank in self._alive()], self._awake_since, now):
            self._begin_hang(stuck, now)
        else:
            self._look_for_hang(now)

    def _starting(self, rank: RankHandle) -> bool:
        return self._board.read(rank.place.rank).phase in ("start", "rendezvous")  # nothing to save yet

    def _look_for_hang(self, now: float) -> None:
        alive = self._alive()
        beats = {rank.place.rank: self._board.read(rank.place.rank) for rank in alive}
        if self.limits.compiles(beats.values(), now):  # others may wait for it
            self._awake_since = now
            return
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
            first = waited_for(stopped or beats, beats)
            self._begin_hang(Failed(first, beats[first].step, int(Exit.PEER), "", ""), now)

    def _begin_hang(self, hang: Failed, now: float) -> None:
        self._hang, self._hang_since = hang, now
        self._signal(signal.SIGUSR1)  # stacks into the logs

    def _hangs(self, rank: RankHandle, beat: Beat, now: float) -> bool:
        """Whether a rank was silent for longer than its phase may take, or stopped by a signal for longer than any may.

        A rank that beats between stops is only slow.
        """
        last_sign = max(beat.at, self._awake_since)
        stopped_s = now - max(last_sign, rank.stopped_since) if rank.stopped_since else 0.0
        return now - last_sign > self.limits.silence(beat) or stopped_s > self.limits.hang_timeout_s

    def _describe_hang(self, hang: Failed, now: float) -> Failed:
        """The hang with its message; without one: phase and step of each rank, and its last frame from its stacks."""
        if hang.message:
            return replace(hang, message=f"{hang.message}; stacks are in {self.folder}/rank_*.log")
        positions = [f"rank {rank.place.rank}: {self._position(rank, now)}" for rank in self._alive()]
        message = (
            f"no sign of life within {self.limits}; {'; '.join(positions)}; stacks are in {self.folder}/rank_*.log"
        )
        return Failed(hang.rank, hang.step, hang.exit, message, "")

    def _position(self, rank: RankHandle, now: float) -> str:
        beat, state, frame = self._board.read(rank.place.rank), rank.state(), last_frame(rank.printed())
        text = f"phase {beat.phase}, step {beat.step}, silent for {now - max(beat.at, self._awake_since):.1f} s"
        return text + (", stopped by a signal" if state in ("T", "t") else f", at {frame}" if frame else "")

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
            self._lose_server()  # it is still importing, and would not read the request soon

    # ------------------------------------------------------------ replacing single ranks

    def _may_replace(self, rank: RankHandle) -> bool:
        return rank.place.role in self.replaceable and self._replaced(rank) < self.max_restarts

    def _replaced(self, rank: RankHandle) -> int:
        return 0 if self._board.read(rank.place.rank).steps > 1 else rank.replaced

    def _end_hung(self, rank: RankHandle, now: float) -> None:
        """Make a hung rank write its stacks, then kill it. A rank that cannot be killed ends the attempt."""
        if not rank.hung_since:
            rank.hung_since = now
            self.server.signal(rank.place.rank, signal.SIGUSR1)
        elif now - rank.hung_since > _UNKILLABLE_S:
            self._failing_since = now
        elif not rank.hang and now - rank.hung_since >= _STACKS_S:
            rank.hang = f"no sign of life within {self.limits}; {self._position(rank, now)}; stacks are in {rank.log}"
            self.server.signal(rank.place.rank, signal.SIGKILL)

    def _lose(self, rank: RankHandle, why: str) -> None:
        """A replaceable rank was lost, and its program did not fail: start it again alone.

        Not when the attempt is ending, and not more than `max_restarts` times in a row.
        """
        if self._stopping_since or self.stop.count or self._only_helpers_left():
            rank.killed = True  # it would have been, a moment later
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
            self._ranks[at].replaced, self._ranks[at].loss = before + 1, Loss.seen(rank.silent_since)
            retry = f"it alone is started again, {before + 1} of {self.max_restarts}"
            self.see(Note("warning", f"rank {place.rank} ({place.role} {place.number}) at step {step}: {why}; {retry}"))

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
        """The fork server is dead or stuck: end it, and with it the ranks."""
        self._failing_since = self._failing_since or time.monotonic()  # nobody is replaced
        self._selector.unregister(self.server.socket)
        self.server.close()
        for rank in self._alive():
            self._end(rank, signal.SIGKILL)

    def _end(self, rank: RankHandle, status: int) -> None:
        while self._on_event(rank):  # its last message may still be on the way
            pass
        rank.status = status
        end = self._rank_exit(rank)
        if end.in_order or rank.killed or self._failing_since:
            return
        result = group_result([end], None, 0)  # as if it had been the only one
        if rank.place.role in self.replaceable and result.external and result.cause:
            self._lose(rank, rank.hang or result.cause.message)
        else:
            self._failing_since = time.monotonic()

    def _on_event(self, rank: RankHandle) -> bool:
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
                # it may have lost a rank whose end this process is about to learn of
                consequence = event.exit == Exit.PEER and rank.place.role in self.replaceable
                if event.exit not in PLANNED_EXITS and not consequence and not self._failing_since:
                    self._failing_since = time.monotonic()
        elif isinstance(event, Stepped) and rank.loss:
            self.see(Note("info", f"{rank.place.role} {rank.place.number} {recovered(rank.loss, event.marks)}"))
        else:
            self.saved = self.saved or isinstance(event, Saved)
            self.resumed = self.resumed or (isinstance(event, Started) and event.step > 0)
            self.see(event)
        return True

    def _result(self) -> GroupResult:
        exits = [self._rank_exit(rank) for rank in self._ranks]
        result = group_result(exits, self._hang, self.stop.count, self.others.failed if self.others else None)
        blamed = next((rank for rank in self._ranks if result.cause and rank.place.rank == result.cause.rank), None)
        sign = blamed and (self._board.last_sign(blamed.place.rank) if self._hang else blamed.silent_since)
        self.loss = Loss.seen(sign or 0.0, self._failing_since, self._hang_since)
        return self._waits.explain(result, [rank.place.rank for rank in self._ranks])

    def _rank_exit(self, rank: RankHandle) -> RankExit:
        number = rank.place.rank
        return RankExit(
            number,
            self._board.read(number).step,
            self._starting(rank),
            rank.status or 0,
            rank.killed,
            rank.failed,
            rank.at,
            rank.printed(),
            rank.place.role in self.replaceable,
            bool(rank.failed) or self._board.read(number).phase == "end",
        )
