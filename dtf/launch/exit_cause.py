"""Why a set of ranks ended: tells the cause from its consequences. Values in, values out; touches no process."""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass
from typing import Any

from dtf.core.errors import PLANNED_EXITS, ConfigError, DtfError, Exit
from dtf.core.types import Failed

_LAST_LINES = 20


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    rank: int
    step: int  # optimizer steps it had finished, from its last heartbeat
    starting: bool  # it had not begun its work
    status: int  # as of os.waitpid
    killed: bool  # by the launching process
    failed: Failed | None  # its own last words
    at: float  # when it said them, time.monotonic()
    log: str  # what it printed in this attempt
    replaceable: bool = False  # of a role that holds nothing, see `Strategy.replaceable`

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 when none did."""
        return self.status & 0x7F

    @property
    def code(self) -> int:
        """Its exit status, 0 after a signal."""
        return self.status >> 8


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    `cause` is None when it ended well; `external`: nothing in the program failed, so trying again may help.
    """

    exit: Exit
    cause: Failed | None = None
    external: bool = False
    consequence: bool = False  # all that is known is that others were lost: whoever lost them knows more

    @property
    def failed(self) -> bool:
        """Whether others have to end for it."""
        return self.exit not in (Exit.OK, Exit.PREEMPTED)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Inverse of `to_json`; ValueError, KeyError or TypeError for anything else."""
        return cls(
            Exit(data["exit"]),
            Failed(**data["cause"]) if data["cause"] else None,
            data["external"],
            data["consequence"],
        )


def together(outcomes: list[Outcome]) -> Outcome:
    """The outcome of an attempt from those of its hosts: the failure that is not about a lost peer, of these the one
    that came first in the run.
    """
    failures = [each for each in outcomes if each.failed]
    if failures:
        return min(failures, key=lambda each: (each.consequence, each.cause.step if each.cause else 0))
    return next((each for each in outcomes if each.exit), Outcome(Exit.OK))


def outcome(endings: list[Ending], hang: Failed | None, stop_signals: int, elsewhere: Failed | None = None) -> Outcome:
    """The one cause of an attempt's end. `hang`: the launching process found ranks silent and killed them;
    `stop_signals`: it was asked to stop; `elsewhere`: another host failed, for which these ranks were killed. Once all
    others have ended in order, how replaceable ranks were lost is of no account.

    A death by signal comes before all words: the others' words are then about a lost connection. Among words the
    earliest counts that is not about a lost peer.
    """
    leading = [ending for ending in endings if not ending.replaceable]
    if leading and all(not ending.signal and ending.code in (Exit.OK, *PLANNED_EXITS) for ending in leading):
        endings = [
            *leading,
            *(
                ending
                for ending in endings
                if ending.replaceable and ending.failed and ending.failed.exit not in (Exit.PEER, *PLANNED_EXITS)
            ),
        ]
    own = [ending for ending in endings if not ending.killed and ending.status and ending.code not in PLANNED_EXITS]
    deaths = [ending for ending in own if ending.signal and not (stop_signals and ending.signal == signal.SIGTERM)]
    spoke = [ending for ending in endings if ending.failed and ending.failed.exit not in PLANNED_EXITS]
    words = sorted(spoke, key=lambda ending: (ending.failed is not None and ending.failed.exit == Exit.PEER, ending.at))
    if any(ending.signal != signal.SIGABRT for ending in deaths) or (deaths and not words):
        return _death(next((ending for ending in deaths if ending.signal != signal.SIGABRT), deaths[0]))
    starting = all(ending.starting for ending in endings)
    if stop_signals > 1 and not starting and any(ending.killed for ending in endings):
        return _lost(endings, "stopped at once by a second signal")
    if words and words[0].failed:
        cause = words[0].failed
        known = cause.exit in list(Exit)
        lost = cause.exit == Exit.PEER
        return Outcome(
            Exit(cause.exit) if known else Exit.BUG, cause, external=lost and not cause.patient, consequence=lost
        )
    if hang and hang.message:  # else killed for another reason before it was described
        return Outcome(Exit.PEER, hang, external=True)
    if elsewhere:
        return Outcome(Exit.PEER, elsewhere, external=True, consequence=True)
    silent = [ending for ending in own if not ending.signal]
    if silent:
        return _gone(silent[0], f"ended with exit status {silent[0].code} without saying why")
    # its handler was not set yet, or it was killed
    if any(ending.signal == signal.SIGTERM for ending in own) or (stop_signals and starting):
        first = own[0] if own else endings[0]
        text = "asked to stop while ranks were starting; nothing is lost; start again with the same run.dir to go on"
        return Outcome(Exit.PREEMPTED, Failed(first.rank, first.step, int(Exit.PREEMPTED), text, ""))
    if any(ending.killed for ending in endings):
        return _lost(endings, "asked to stop, but not done within launcher.grace_s")
    orderly = [ending for ending in endings if ending.code in PLANNED_EXITS]
    if orderly:
        first = min(orderly, key=lambda ending: ending.rank)
        return Outcome(
            Exit(first.code),
            first.failed or Failed(first.rank, first.step, first.code, "told to stop; the state is saved", ""),
        )
    return Outcome(Exit.OK)


def preload_error(message: str, trace: str) -> DtfError:
    """What it means that the fork server could not import what ranks need."""
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


def innermost(stacks: str) -> str:
    """Where the main thread stands, `file:line in function`, from what faulthandler wrote last; empty when it wrote
    nothing.
    """
    dump = stacks.rpartition("\nCurrent thread 0x")[2] if "Current thread 0x" in stacks else ""
    main = re.split(r"\n\n(?:Thread|Current thread) 0x", dump)[0]
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


def _death(ending: Ending) -> Outcome:
    try:
        name = signal.Signals(ending.signal).name
    except ValueError:
        name = f"signal {ending.signal}"
    if ending.signal == signal.SIGKILL:
        text = f"killed by {name}; by somebody, or by the system for want of memory"
        return Outcome(Exit.PEER, Failed(ending.rank, ending.step, int(Exit.PEER), text, ""), external=True)
    return _gone(ending, f"killed by {name}")


def _gone(ending: Ending, how: str) -> Outcome:
    """A rank that ended without last words, so that only its log can say why."""
    tail = "\n".join(ending.log.strip().splitlines()[-_LAST_LINES:])
    text = f"{how}; {f'what it printed is in rank_{ending.rank}.log' if tail else 'it printed nothing'}"
    return Outcome(Exit.PEER, Failed(ending.rank, ending.step, int(Exit.PEER), text, tail), external=True)


def _lost(endings: list[Ending], why: str) -> Outcome:
    step = min(ending.step for ending in endings)
    text = (
        f"{why}; what was trained since the last checkpoint is lost; start again with the same run.dir to go on from it"
    )
    return Outcome(Exit.PEER, Failed(endings[0].rank, step, int(Exit.PEER), text, ""))
