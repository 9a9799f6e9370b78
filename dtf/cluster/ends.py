"""When a run that a platform would start again has ended: it is finished, or it makes no progress.

For platforms without a script beside the run that could know: what is known lies in the run folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from dtf.checkpoint.storage import checkpoints
from dtf.cluster.platform import JOB_FOLDER
from dtf.core.errors import Exit, NoProgressError
from dtf.core.files import replace_text
from dtf.core.run_record import ends_of_submission

COUNTED = (Exit.PEER, Exit.HARDWARE, Exit.IO)
"""Ends after which another start may help. A preemption is none of them: it says nothing against the run."""
MOST = 3
_FILE = "ends.json"


def count_end(exit: int, run_dir: Path) -> None:
    """Note that a start of the run in `run_dir` ended with this code; to be called by one process of the job.

    NoProgressError for the third of COUNTED in a row without a new checkpoint. A folder that cannot be written counts
    nothing: then the disk is what failed.
    """
    if exit not in COUNTED:
        return
    path = run_dir / JOB_FOLDER / _FILE
    saved = checkpoints(run_dir / "checkpoints")
    newest = saved[0].name if saved else ""
    try:
        known = json.loads(path.read_text())
        ends = known["ends"] if known["newest"] == newest else 0
    except (OSError, ValueError, KeyError, TypeError):
        ends = 0
    try:
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps({"newest": newest, "ends": ends + 1}) + "\n")
    except OSError:
        return
    if ends + 1 >= MOST:
        raise NoProgressError(
            f"the job was started {MOST} times without a new checkpoint and ended with {int(exit)} at last; what it "
            "said then is in the logs"
        )


def is_finished(run_dir: Path, digest: str) -> bool:
    """Whether a launch of this bundle has ended well, also where another submission went on since then. A process that
    was lost then, a moment before its own end, would wait for others that never come.
    """
    return bool(digest) and Exit.OK in ends_of_submission(run_dir, digest)
