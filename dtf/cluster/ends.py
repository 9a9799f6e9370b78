"""What a job notes in its run folder of its starts and their ends: whether it is finished, or makes no progress.

For platforms without a script beside the run that could know.
"""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtf.cluster.after_exit import After, after, goes_on, newest_checkpoint
from dtf.cluster.platform import JOB_FOLDER
from dtf.core.errors import DataError, Exit, NoProgressError
from dtf.core.files import replace_text, small_json
from dtf.core.run_record import ends_of_submission

_FILE = "ends.json"


def count_start(run_dir: Path, digest: str) -> None:
    """Note that the run of this bundle starts; to be called by one process of the job. An earlier start that has noted
    no end was lost: killed, or its node was. NoProgressError as of `count_end`.
    """
    known = _known(run_dir, digest)
    if known["open"]:
        _count(None, run_dir, known, "was killed or lost its node at last")
    with suppress(OSError):  # whoever makes the run folder says what is wrong
        (run_dir / JOB_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep(run_dir, known | {"open": True})


def count_end(code: int, run_dir: Path, digest: str) -> None:
    """Note that a start ended with this code; by the process that called `count_start`.

    NoProgressError for the third loss in a row without a new checkpoint, see `after_exit`. A folder that cannot be
    written counts nothing: then the disk is what failed.
    """
    known = _known(run_dir, digest)
    if known["open"] or after(code) is After.lost:
        _count(code, run_dir, known, f"ended with {int(code)} at last; what it said then is in the logs")


def _count(code: int | None, run_dir: Path, known: dict[str, Any], how: str) -> None:
    newest = newest_checkpoint(run_dir)
    again, lost = goes_on(code, newest != known["newest"], known["lost"])
    if not _keep(run_dir, known | {"newest": newest, "lost": lost, "open": False}):
        return
    known |= {"newest": newest, "lost": lost}
    if after(code) is After.lost and not again:
        raise NoProgressError(f"the job was started {lost} times without a new checkpoint and {how}")


def _known(run_dir: Path, digest: str) -> dict[str, Any]:
    """The last note of this submission; that of an earlier one says nothing about it. DataError for a file that no job
    writes: without it ends would be counted anew each time.
    """
    fresh = {"digest": digest, "newest": newest_checkpoint(run_dir), "lost": 0, "open": False}
    path = run_dir / JOB_FOLDER / _FILE
    try:
        known = small_json(path)
        if known.keys() != fresh.keys() or any(type(known[key]) is not type(fresh[key]) for key in fresh):
            raise ValueError("it is not what a job writes")
    except (OSError, ValueError) as error:
        foreign = not isinstance(error, OSError) or error.errno in (errno.EISDIR, errno.EINVAL)
        if not foreign:
            return fresh
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); remove it") from error
    return known if known["digest"] == digest else fresh


def _keep(run_dir: Path, known: dict[str, Any]) -> bool:
    path = run_dir / JOB_FOLDER / _FILE
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_text(path, json.dumps(known) + "\n")
    except OSError:
        return False
    return True


def is_finished(run_dir: Path, digest: str) -> bool:
    """Whether a launch of this bundle has ended well, also where another submission went on since then. A process that
    was lost then, a moment before its own end, would wait for others that never come.
    """
    return bool(digest) and Exit.OK in ends_of_submission(run_dir, digest)
