"""What the launching process knows of its ranks, and of other hosts: values and contracts for `worker_group`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dtf.core.types import Event, Failed, Note, Place
from dtf.host.heartbeat import Beat
from dtf.launch.exit_cause import GroupResult
from dtf.launch.recovery import Loss


@dataclass(frozen=True)
class Limits:
    """Seconds of silence that mean a hang, and seconds that ranks get to stop."""

    hang_timeout_s: float
    start_timeout_s: float
    grace_s: float

    def __str__(self) -> str:
        return f"launcher.hang_timeout_s={self.hang_timeout_s:g}, launcher.start_timeout_s={self.start_timeout_s:g}"

    def silence(self, beat: Beat) -> float:
        """The most seconds that a rank may stay at this beat.

        The first step of a process builds buckets and kernels: it gets `start_timeout_s`.
        """
        return (
            self.hang_timeout_s if beat.phase in ("fetch", "step", "log") and beat.steps > 1 else self.start_timeout_s
        )

    def compiles(self, beats: Iterable[Beat], now: float) -> bool:
        """Whether a rank compiles, and not for too long."""
        return any(beat.phase == "compile" and now - beat.at <= self.start_timeout_s for beat in beats)


def waited_for(ranks: Iterable[int], beats: Mapping[int, Beat]) -> int:
    """Of some ranks the one that the others wait for."""
    return min(ranks, key=lambda rank: (beats[rank].phase == "wait", beats[rank].step, beats[rank].at))


@dataclass
class RankHandle:
    """One rank as the launching process knows it."""

    place: Place
    channel: socket.socket
    log: Path
    log_start: int  # bytes in the log before this attempt
    pid: int = 0
    status: int | None = None  # as of os.waitpid; None while it lives
    killed: bool = False  # by us
    failed: Failed | None = None  # its own last message
    at: float = 0.0  # when it sent it
    silent_since: float = 0.0  # when it closed its channel: it has ended, though the server has not reported it
    stopped_since: float = 0.0  # it was found stopped by a signal, and at every check since
    hung_since: float = 0.0  # it was found to hang, and asked for its stacks, to be replaced
    hang: str = ""  # killed for it: what was seen
    loss: Loss | None = None  # of the process in whose place this one is
    replaced: int = 0  # replacements of this rank since one of its processes finished a step

    def printed(self) -> str:
        """The last 64 KiB that it printed in this attempt; empty when the log is gone."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, self.log.stat().st_size - (1 << 16)))
                return file.read(1 << 16).decode(errors="replace")
        except OSError:  # the run folder was removed
            return ""

    def state(self) -> str:
        """The process state in /proc: R running, S waiting, D in the kernel, T stopped; empty when it is gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""


def open_log(path: Path, place: Place, see: Callable[[Event], None]) -> int:
    """The log of a rank, or a file that keeps nothing where it cannot be made: the run goes on without."""
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        see(Note("warning", f"{path.name} is not written, the run goes on: {error.strerror}"))
        return os.open(os.devnull, os.O_WRONLY)
    if place.attempt or place.retry:
        alone = f", started again alone: {place.retry}" if place.retry else ""
        with contextlib.suppress(OSError):
            os.write(log, f"---- attempt {place.attempt}{alone}\n".encode())
    return log


class OtherHosts(Protocol):
    """The other hosts of an attempt, see `host_rendezvous.HostRendezvous`."""

    failed: Failed | None  # a failure there, for which the ranks of this host have to end

    def fileno(self) -> int: ...  # readable when there is something to receive
    def receive(self) -> None: ...
    def tick(self) -> None: ...  # called at least once a second
    def begin_attempt(self, number: int, store: str) -> None: ...
    def report_result(self, result: GroupResult) -> GroupResult: ...  # this host's; returns that of all hosts
