"""Why a set of ranks ended: which failure is the cause, and which are its consequences. Pure functions."""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass
from typing import Any

from dtf.core.errors import PLANNED_EXITS, ConfigError, DtfError, Exit
from dtf.core.types import Failed

_LAST_LINES = 20
_UNLIKE_SIZES = "op.preamble.length <= op.nbytes"
"""What gloo prints before it aborts a process that got another number of bytes than it waited for."""


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    step: int  # optimizer steps it had finished, from its last heartbeat
    starting: bool  # it had not begun its work
    status: int  # as of os.waitpid
    killed: bool  # by the launching process
    failed: Failed | None  # its own last message
    at: float  # when it sent it, time.monotonic()
    log: str  # what it printed in this attempt
    replaceable: bool = False  # of a role that holds nothing, see `HelperRoles.replaceable`
    returned: bool = True  # its work returned, or failed, before it ended

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 when none did."""
        return self.status & 0x7F

    @property
    def code(self) -> int:
        """Its exit status, 0 after a signal."""
        return self.status >> 8

    @property
    def in_order(self) -> bool:
        """Whether nothing has to be said about its end."""
        return self.code in PLANNED_EXITS if self.status else self.returned


@dataclass(frozen=True)
class GroupResult:
    """How the ranks of an attempt ended, on one host or on all.

    `cause` is None when they ended well. `external`: nothing in the program failed, so another try may help.
    """

    exit: Exit
    cause: Failed | None = None
    external: bool = False
    consequence: bool = False  # they ended because other ranks were lost; the cause is with those

    @property
    def failed(self) -> bool:
        """Whether ranks on other hosts have to end because of it."""
        return self.exit not in (Exit.OK, Exit.PREEMPTED)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GroupResult:
        """Inverse of `to_json`; ValueError, KeyError or TypeError for anything else."""
        return cls(
            Exit(data["exit"]),
            Failed(**data["cause"]) if data["cause"] else None,
            data["external"],
            data["consequence"],
        )


def combine_hosts(results: list[GroupResult]) -> GroupResult:
    """The result of an attempt from those of its hosts.

    Among failures, the one that is no consequence of a lost peer; among those, the one at the lowest step.
    """
    failures = [result for result in results if result.failed]
    if failures:
        return min(failures, key=lambda result: (result.consequence, result.cause.step if result.cause else 0))
    return next((result for result in results if result.exit), GroupResult(Exit.OK))


def group_result(
    exits: list[RankExit], hang: Failed | None, stop_signals: int, elsewhere: Failed | None = None
) -> GroupResult:
    """The result of ranks that have all ended, with one cause.

    `hang`: the launching process killed ranks that were silent, or, as a config error, proven never to meet.
    `stop_signals`: how often it was asked to stop. `elsewhere`: another host failed, and these ranks were killed for
    it.

    A death by signal comes before all messages, as those of the others are then about a lost connection. Among messages
    the earliest counts that is not about a lost peer. The loss of replaceable ranks does not count once all others
    have ended in order.
    """
    exits = _relevant(exits)
    own = [e for e in exits if not e.killed and not e.in_order]
    deaths = [e for e in own if e.signal and not (stop_signals and e.signal == signal.SIGTERM)]
    sent = [(e.at, e.failed) for e in exits if e.failed and e.failed.exit not in PLANNED_EXITS]
    failures = sorted(sent, key=lambda message: (message[1].exit == Exit.PEER, message[0]))
    aborted = all(e.signal == signal.SIGABRT for e in deaths)
    unlike = next((e for e in deaths if _UNLIKE_SIZES in e.log), None)
    if aborted and unlike and all(failed.exit == Exit.PEER for _, failed in failures):
        return _mismatch(unlike)
    if not aborted or (deaths and not failures):
        return _death(next((e for e in deaths if e.signal != signal.SIGABRT), deaths[0]))
    silent = [e for e in own if not e.signal and e.failed is None]
    if silent and failures and all(failed.exit == Exit.PEER for _, failed in failures):
        return _without_words(silent[0])
    starting = all(e.starting for e in exits)
    if stop_signals > 1 and not starting and any(e.killed for e in exits):
        return _lost(exits, "stopped at once by a second signal")
    if failures:
        return _failure(failures[0][1])
    if hang and hang.message:  # else killed for another reason before it was described
        return GroupResult(Exit(hang.exit), hang, external=hang.exit == Exit.PEER)
    if elsewhere:
        return GroupResult(Exit.PEER, elsewhere, external=True, consequence=True)
    if silent:
        return _without_words(silent[0])
    # its handler was not set yet, or it was killed
    if any(e.signal == signal.SIGTERM for e in own) or (stop_signals and starting):
        first = own[0] if own else exits[0]
        text = "asked to stop while ranks were starting; nothing is lost; start again with the same run.dir to go on"
        return GroupResult(Exit.PREEMPTED, Failed(first.rank, first.step, int(Exit.PREEMPTED), text, ""))
    if any(e.killed for e in exits):
        return _lost(exits, "asked to stop, but not done within launcher.grace_s")
    orderly = [e for e in exits if e.code in PLANNED_EXITS]
    if orderly:
        first = min(orderly, key=lambda e: e.rank)
        return GroupResult(
            Exit(first.code),
            first.failed or Failed(first.rank, first.step, first.code, "told to stop; the state is saved", ""),
        )
    return GroupResult(Exit.OK)


def _relevant(exits: list[RankExit]) -> list[RankExit]:
    """All, or, once all others have ended in order, no replaceable rank but those whose own program failed."""
    others = [e for e in exits if not e.replaceable]
    if not others or any(not e.in_order for e in others):
        return exits
    return others + [
        e for e in exits if e.replaceable and e.failed and e.failed.exit not in (Exit.PEER, *PLANNED_EXITS)
    ]


def _failure(cause: Failed) -> GroupResult:
    """The result of a rank that sent why it failed."""
    lost = cause.exit == Exit.PEER
    exit = Exit(cause.exit) if cause.exit in list(Exit) else Exit.BUG
    external = (lost and not cause.patient) or exit is Exit.HARDWARE
    return GroupResult(exit, cause, external=external, consequence=lost)


def preload_error(message: str, trace: str) -> DtfError:
    """The error for a fork server that could not import what ranks need."""
    if "torchvision::" in message and "does not exist" in message:
        return ConfigError(
            "torchvision does not fit the installed torch (one is a CPU build, or of another release); "
            "install both together: python -m pip install --force-reinstall torch torchvision"
        )
    missing = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", message)
    if missing:
        return ConfigError(
            f"{missing[1]} is not installed for this Python; install dtf with its requirements: python -m pip install "
            "-e ."
        )
    return DtfError(f"what ranks need cannot be imported: {message}\n{trace}")


def last_frame(stacks: str) -> str:
    """The last frame of the main thread, `file:line in function`, in the last dump that faulthandler wrote.

    Empty when there is none.
    """
    dump = stacks.rpartition("\nCurrent thread 0x")[2] if "Current thread 0x" in stacks else ""
    main = re.split(r"\n\n(?:Thread|Current thread) 0x", dump)[0]
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f"{frame[1]}:{frame[2]} in {frame[3]}" if frame else ""


def _death(rank_exit: RankExit) -> GroupResult:
    try:
        name = signal.Signals(rank_exit.signal).name
    except ValueError:
        name = f"signal {rank_exit.signal}"
    if rank_exit.signal == signal.SIGKILL:
        text = f"killed by {name}; by somebody, or by the system for want of memory"
        return GroupResult(Exit.PEER, Failed(rank_exit.rank, rank_exit.step, int(Exit.PEER), text, ""), external=True)
    return _gone(rank_exit, f"killed by {name}")


def _mismatch(rank_exit: RankExit) -> GroupResult:
    """The result of a rank that got a tensor of another size in a collective than it gave itself."""
    text = (
        "gloo ended it: ranks gave tensors of different sizes to one collective operation, or called different ones; "
        f"the call is in rank_{rank_exit.rank}.log; each rank must make the same calls in the same order"
    )
    exit = int(Exit.CONFIG)
    return GroupResult(Exit.CONFIG, Failed(rank_exit.rank, rank_exit.step, exit, text, ""))


def _without_words(rank_exit: RankExit) -> GroupResult:
    """The result of a rank that ended by itself and sent nothing."""
    how = "without saying why" if rank_exit.code else "before its work was done, as by os._exit()"
    return _gone(rank_exit, f"ended with exit status {rank_exit.code} {how}")


def _gone(rank_exit: RankExit, how: str) -> GroupResult:
    """The result of a rank that ended without a message, so that only its log can say why."""
    tail = "\n".join(rank_exit.log.strip().splitlines()[-_LAST_LINES:])
    text = f"{how}; {f'what it printed is in rank_{rank_exit.rank}.log' if tail else 'it printed nothing'}"
    return GroupResult(Exit.PEER, Failed(rank_exit.rank, rank_exit.step, int(Exit.PEER), text, tail), external=True)


def _lost(exits: list[RankExit], why: str) -> GroupResult:
    step = min(rank_exit.step for rank_exit in exits)
    text = (
        f"{why}; what was trained since the last checkpoint is lost; start again with the same run.dir to go on from it"
    )
    return GroupResult(Exit.PEER, Failed(exits[0].rank, step, int(Exit.PEER), text, ""))
