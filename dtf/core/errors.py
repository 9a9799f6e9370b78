"""How a run can fail: an exception class, an exit code and one printed line for each way."""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from dtf.core.text import harmless

LONGEST = 2000
"""Characters of an error line; messages may quote what others wrote."""


INTERRUPTED, PIPE_CLOSED = 130, 141
"""As a shell reports a program that SIGINT or SIGPIPE ended."""


class Exit(IntEnum):
    """Exit codes of a dtf process; a scheduler may rely on them (docs/exit-codes.md)."""

    OK = 0
    BUG = 1
    CONFIG = 2
    DATA = 65
    PEER = 69
    HARDWARE = 71
    BUSY = 73
    IO = 74
    PREEMPTED = 75
    AUTH = 77
    DIVERGED = 79
    BUDGET = 80
    NO_PROGRESS = 93


PLANNED_EXITS = (Exit.PREEMPTED, Exit.BUDGET)
"""Exit codes with which all ranks end in the same way, after a save. No process has to be killed then."""


STARTED_AGAIN = (Exit.PEER, Exit.HARDWARE, Exit.BUSY, Exit.IO, Exit.PREEMPTED)
"""Exit codes after which the same command may be started again, and go on. After others something has to change."""


class DtfError(Exception):
    """The base class of all expected failures. The message reads `what; why; what to do`."""

    exit = Exit.BUG
    patient = False
    """Whether the process has already waited for what it misses, so that a restart at once is of no use."""
    by_author = False
    """Whether code of a recipe or a model raised it: its author wants the traceback."""
    raised_by_all = False
    """Whether all ranks raise it alike, so that the one that is heard first is not to blame."""
    blames: int | None = None
    """Of one that all ranks raise: the rank that is wrong. None: no single one is known to be."""
    folder: Path | None = None
    """The run folder, of an error that `dtf.train` raises. None: the run had none yet."""


Raised = TypeVar("Raised", bound=DtfError)


def by_all(error: Raised) -> Raised:
    """The error, which all ranks raise."""
    error.raised_by_all = True
    return error


class ConfigError(DtfError):
    """The composed config cannot run: unknown key, wrong value, impossible combination."""

    exit = Exit.CONFIG


class LayoutError(ConfigError):
    """A recipe's layout says what does not hold for its model. A layout that says nothing is none."""


class NeverMeetError(ConfigError):
    """Ranks wait in different operations, and no module that some rows do not use explains it: the program is wrong."""


class DataError(DtfError):
    """The data set or a checkpoint to load is missing, unreadable or corrupt."""

    exit = Exit.DATA


class PeerError(DtfError):
    """A rank died or hung and the restarts are used up. Requeue the job."""

    exit = Exit.PEER


class CorruptionError(DtfError):
    """Replicas differ that compute alike: a machine changed bits. Requeue the job without the machine that it names."""

    exit = Exit.HARDWARE
    raised_by_all = True

    def __init__(self, message: str, blames: int | None = None) -> None:
        super().__init__(message)
        self.blames = blames


class BusyError(DtfError):
    """The run folder is locked by a live run, or holds another run."""

    exit = Exit.BUSY


class SaveError(DtfError):
    """A checkpoint, or what a run records, could not be written; complete checkpoints are kept. Requeue the job."""

    exit = Exit.IO


class Preempted(DtfError):
    """The process got a signal to stop (SIGTERM or SIGINT), or its allocation ends. The message says what was saved.
    Requeue the job.
    """

    exit = Exit.PREEMPTED


class OutOfTime(Preempted):
    """The allocation ends before the first step. The next one may be as short."""


class AuthError(DtfError):
    """A peer that should have the token of the run sent another one, or none."""

    exit = Exit.AUTH


class DivergedError(DtfError):
    """Loss or gradients were not finite more often than `train.skip_nonfinite` allows."""

    exit = Exit.DIVERGED
    raised_by_all = True


class BudgetError(DtfError):
    """`budget.hours` or `budget.cost` is spent; the state was saved. Raise it to go on."""

    exit = Exit.BUDGET
    raised_by_all = True


class NoProgressError(DtfError):
    """Three restarts in a row without a new checkpoint, or three allocations without a step."""

    exit = Exit.NO_PROGRESS


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys((errno.EIO, errno.EROFS, errno.ESTALE), "mend the disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    errno.EFBIG: "allow larger files (ulimit -f)",
}


def io_failure(error: BaseException, folder: str | Path = "") -> SaveError | None:
    """The SaveError for an OSError that says that a disk or a quota is full, that a disk fails, or that no more or no
    larger files are allowed. None for any other error. `folder`: of the run, where there is one.
    """
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    where = error.filename if isinstance(error.filename, str) else folder
    kept = "; the last complete checkpoint is kept" if folder and _has_checkpoint(Path(folder)) else ""
    return SaveError(
        f"{f'{where}: ' if where else ''}{error.strerror}{kept}; {_REMEDIES[error.errno]}, then start again with the "
        "same run.dir"
    )


def io_failure_told(text: str, folder: str | Path) -> SaveError | None:
    """As `io_failure` for what another program says, such as a compiler, that writes in `folder`."""
    number = next((number for number in _REMEDIES if os.strerror(number) in text), None)
    return None if number is None else io_failure(OSError(number, os.strerror(number), str(folder)))


def _has_checkpoint(folder: Path) -> bool:
    try:
        return (folder / "checkpoints" / "latest").is_file()
    except OSError:  # the disk fails
        return False


def code_name(exit: Exit) -> str:
    """`Exit.CONFIG` -> `E_CONFIG`, as printed and documented."""
    return f"E_{exit.name}"


def error_line(exit: Exit, message: str, rank: int | None = None, step: int | None = None) -> str:
    """The one line that ends a failed run, on standard error."""
    where = "".join(f" {key}={value}" for key, value in (("rank", rank), ("step", step)) if value is not None)
    text = " ".join(harmless(message).split())
    return f"dtf: error[{code_name(exit)}]{where}: {text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}"
