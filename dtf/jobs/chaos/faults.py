"""The faults that `job=chaos` rehearses. One class for each kind; FAULTS has them by name."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import resource
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dtf.checkpoint.storage import checkpoints
from dtf.core.errors import Exit
from dtf.jobs.chaos import network, preload, processes

ANY, LAUNCHER, FORK_SERVER, RUN = "rank", "launcher", "fork server", "run"
"""Whom a fault hits: any rank, one process, or all of the run. Else a role, such as `server`."""
TOLD_TO_STOP = 128 + signal.SIGTERM

RESUMED = frozenset({Exit.OK, Exit.PEER})
"""Where a lost process is replaced, or restarts are used up."""


@dataclass
class Target:
    """A trial's run while it is disturbed. `rank`: the one to hit, of faults that hit one."""

    launcher: int
    folder: Path
    rng: random.Random
    rank: int = 0
    rows: Path | None = None  # sparse.disk
    control: preload.Control | None = None
    switch: int = -1  # write `0` or `1`: cut or join the network
    done: list[str] = field(default_factory=list)  # what was done, in words
    stopped: list[int] = field(default_factory=list)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal, if the process still lives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    @property
    def victim(self) -> int:
        """The process of the rank; 0: it is not there now."""
        return processes.ranks(self.launcher).get(self.rank, 0)


class Fault(ABC):
    """A way to disturb a run."""

    whom: str = RUN
    codes: frozenset[int] = RESUMED
    """Documented exit codes of the disturbed command."""
    needs_control: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False
    recovers: ClassVar[bool] = True
    """Whether the run notices and replaces what was lost, so that it can be timed."""
    hands_over: ClassVar[bool] = False
    """Whether the run goes on under other strategies."""

    def refused(self) -> str:
        """Why it cannot be rehearsed on this machine; empty where it can."""
        return ""

    @abstractmethod
    def strike(self, target: Target) -> float:
        """Do it, and note in `target.done` what was done; nothing, where nobody is there to hit. Returns after how many
        seconds `release` is to be called; inf: when the command has ended.
        """

    def release(self, target: Target) -> None:
        """Take it away again, if that can be done."""

    def between(self, target: Target) -> None:
        """Called before the command is started again."""


@dataclass
class Kill(Fault):
    """SIGKILL."""

    whom: str = ANY
    codes: frozenset[int] = RESUMED

    def strike(self, target: Target) -> float:
        pid, name = target.victim, f"rank {target.rank}"
        if self.whom == LAUNCHER:
            pid, name = target.launcher, "the launcher"
        elif self.whom == FORK_SERVER:
            pid, name = processes.fork_server(target.launcher), "the fork server"
        if pid:
            target.done.append(f"killed {name}")
            target.signal(pid, signal.SIGKILL)
        return 0.0


@dataclass
class StopRank(Fault):
    """SIGSTOP, for a moment or for good."""

    whom: str = ANY

    def strike(self, target: Target) -> float:
        short = target.rng.random() < 0.4
        if pid := target.victim:
            target.signal(pid, signal.SIGSTOP)
            target.stopped.append(pid)
            target.done.append(f"stopped rank {target.rank}{' for a moment' if short else ''}")
        return target.rng.uniform(0.05, 1.0) if short else math.inf

    def release(self, target: Target) -> None:
        for pid in target.stopped:
            target.signal(pid, signal.SIGCONT)


@dataclass
class Term(Fault):
    """SIGTERM to the launching process, to one rank, or to all, as schedulers do."""

    codes: frozenset[int] = frozenset({Exit.OK, Exit.PREEMPTED, TOLD_TO_STOP, -signal.SIGTERM, Exit.PEER})
    recovers = False

    def strike(self, target: Target) -> float:
        to = target.rng.choice(["the launcher", "one rank", "all processes"])
        pids = {
            "the launcher": [target.launcher],
            "one rank": [target.victim],
            "all processes": [target.launcher, *processes.descendants(target.launcher)],
        }[to]
        for pid in filter(None, pids):
            target.signal(pid, signal.SIGTERM)
        if any(pids):
            target.done.append(f"SIGTERM to {to}")
        return 0.0


class _Preloaded(Fault):
    needs_control = True

    def refused(self) -> str:
        return "" if preload.compiler() else "it needs a C compiler (cc) to make a preload library"


@dataclass
class Disk(_Preloaded):
    """Writes below the run folder, sparse.disk or both fail or wait. `mode`: see `preload.Control.disk`."""

    mode: str = "full"
    codes: frozenset[int] = frozenset({Exit.OK, Exit.IO})
    recovers = False

    def strike(self, target: Target) -> float:
        assert target.control is not None
        after = target.rng.randrange(40) if self.mode == "fail" else 0
        number = (
            target.rng.choice([errno.EIO, errno.EIO, errno.ENOSPC, errno.EDQUOT])
            if self.mode == "fail"
            else errno.ENOSPC
        )
        failures = target.rng.choice([1, 1, preload.ALL]) if self.mode == "fail" else preload.ALL
        delay = target.rng.choice([0.005, 0.02, 0.1]) if self.mode == "slow" else 0.0
        folders, where = [target.folder], ""
        if target.rows is not None:
            folders, where = target.rng.choice(
                [
                    ([target.folder, target.rows], ""),
                    ([target.rows], " below sparse.disk"),
                    ([target.folder], " below the run folder"),
                ]
            )
        target.control.disk(self.mode, folders, number, after, failures, delay)
        later = "" if failures == 1 else " and all later ones"
        words = {
            "full": "the disk is full",
            "slow": f"each write takes {delay * 1000:.0f} ms more",
            "fail": f"{errno.errorcode[number]} at call {after + 1}{later}",
        }
        target.done.append(words[self.mode] + where)
        return math.inf if target.rng.random() < 0.7 else target.rng.uniform(0.1, 2.0)

    def release(self, target: Target) -> None:
        if target.control is not None:
            target.control.disk("off", [])


@dataclass
class ClockJump(_Preloaded):
    """The clock of the day is set, forward or back."""

    codes: frozenset[int] = frozenset({Exit.OK})
    recovers = False

    def strike(self, target: Target) -> float:
        assert target.control is not None
        seconds = target.rng.choice([-1, 1]) * target.rng.choice([1.0, 60.0, 3600.0, 86_400.0 * 400])
        target.control.move_clock(seconds)
        target.done.append(f"the clock jumps by {seconds:.0f} s")
        return math.inf

    def release(self, target: Target) -> None:
        if target.control is not None:
            target.control.move_clock(0)


@dataclass
class Network(Fault):
    """The network between the processes is cut, once or again and again."""

    again: bool = False
    codes: frozenset[int] = frozenset({Exit.OK, Exit.PEER, Exit.NO_PROGRESS})
    needs_network = True

    def refused(self) -> str:
        return network.refused()

    def strike(self, target: Target) -> float:
        self._turn(target, b"0")
        if self.again:  # what was sent is sent again: it comes late
            target.done.append("the network is late")
            return target.rng.uniform(0.02, 0.6)
        seconds = target.rng.choice([target.rng.uniform(0.5, 4.0), target.rng.uniform(4.0, 12.0)])
        target.done.append(f"the network is cut for {seconds:.1f} s")
        return seconds

    def release(self, target: Target) -> None:
        self._turn(target, b"1")

    def _turn(self, target: Target, to: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(target.switch, to)


@dataclass
class Limit(Fault):
    """A rank may take no more memory, or a process may open no more files."""

    whom: str = RUN
    resource: int = resource.RLIMIT_AS
    # a process that cannot go on without more has failed by itself: too little memory is a config that cannot run
    codes: frozenset[int] = frozenset({Exit.OK, Exit.BUG, Exit.CONFIG, Exit.PEER, Exit.IO})

    def strike(self, target: Target) -> float:
        memory = self.resource == resource.RLIMIT_AS
        whom = [target.victim] if memory else [target.victim, target.victim, target.launcher]
        pid = target.rng.choice(whom)
        if not pid:
            return 0.0
        used = _size(pid) if memory else _files(pid)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, self.resource, (used, resource.prlimit(pid, self.resource)[1]))
        who = "the launcher" if pid == target.launcher else f"rank {target.rank}"
        target.done.append(f"{who} may have no more {'memory' if memory else 'files'}")
        return math.inf


@dataclass
class FlipCheckpoint(Fault):
    """The launching process is killed, and then the newest checkpoint is damaged."""

    whom: str = LAUNCHER
    codes: frozenset[int] = frozenset({Exit.OK, -signal.SIGKILL})

    def strike(self, target: Target) -> float:
        target.signal(target.launcher, signal.SIGKILL)
        target.done.append("killed the launcher")
        return 0.0

    def between(self, target: Target) -> None:
        newest = checkpoints(target.folder / "checkpoints")[::-1]  # whole ones: a broken-off save is none
        if len(newest) < 2:  # without an older one the run would say that there is none to load, and end
            target.done.append("before the second checkpoint, so nothing is damaged")
            return
        files = sorted(path for path in newest[-1].rglob("*") if path.is_file())
        path, how = target.rng.choice(files), target.rng.choice(["flipped", "truncated", "removed", "emptied"])
        data = bytearray(path.read_bytes())
        if how == "removed":
            path.unlink()
        elif how == "flipped" and data:
            data[target.rng.randrange(len(data))] ^= 1 << target.rng.randrange(8)
            path.write_bytes(data)
        else:
            path.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")
        target.done.append(f"{newest[-1].name}/{path.name} {how}")


@dataclass
class HandOver(Fault):
    """The launching process is asked to stop, or killed, and the run goes on under another strategy."""

    whom: str = LAUNCHER
    codes: frozenset[int] = frozenset({Exit.OK, Exit.PREEMPTED, TOLD_TO_STOP, -signal.SIGTERM, -signal.SIGKILL})
    recovers = False
    hands_over = True

    def strike(self, target: Target) -> float:
        number = target.rng.choice([signal.SIGTERM, signal.SIGKILL])
        target.signal(target.launcher, number)
        target.done.append(f"{number.name} to the launcher")
        return 0.0


def _size(pid: int) -> int:
    """Bytes of address space of a process."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    return 1 << 30


def _files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 64


FAULTS: dict[str, Fault] = {
    "kill_rank": Kill(),
    "kill_server": Kill("server"),
    "kill_trainer": Kill("trainer"),
    "kill_launcher": Kill(LAUNCHER, frozenset({Exit.OK, -signal.SIGKILL})),
    "kill_forkserver": Kill(FORK_SERVER),
    "stop_rank": StopRank(),
    "term": Term(),
    "disk_full": Disk(),
    "disk_slow": Disk("slow", frozenset({Exit.OK})),
    "disk_error": Disk("fail"),
    "cut_network": Network(),
    "delay_network": Network(again=True),
    "memory_limit": Limit(whom=ANY),
    "file_limit": Limit(resource=resource.RLIMIT_NOFILE),
    "clock_jump": ClockJump(),
    "flip_checkpoint": FlipCheckpoint(),
    "hand_over": HandOver(),
}


def fits(fault: Fault, roles: Sequence[str]) -> bool:
    """Whether a strategy whose ranks have these roles has whom, or what, the fault hits."""
    if fault.needs_network and len(roles) == 1:
        return False  # nothing passes between processes
    return fault.whom in (ANY, LAUNCHER, FORK_SERVER, RUN) or (fault.whom in roles and len(set(roles)) > 1)
