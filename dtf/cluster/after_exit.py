"""What a scheduler does after each end of a job's process, and how many losses without a new checkpoint are too many.

Slurm's batch script, Kubernetes' pod failure policy, Ray's driver and the count in the run folder take it from here. Of
the standard library alone: Ray carries it to nodes that have no dtf.
"""

from __future__ import annotations

import os
import re
from enum import Enum

ALWAYS = (75, 143)
"""The run was asked to stop. It starts again, however often. 143: before the first line of dtf had run."""
WHILE_PROGRESS = (69, 71, 73, 74)
"""dtf ends so where another start may help. 73: something lives in the run folder. After the first start it may be this
job's own process, on a node that is lost and does not know it.
"""
FINAL = (1, 2, 65, 77, 79, 80, 93, 126, 127)
"""Another start would end in the same way. 126, 127: a shell that finds no such interpreter."""
MOST = 3
"""Losses in a row without a new checkpoint that end a job: the third one does."""


class After(Enum):
    done = "done"
    again = "again"
    lost = "lost"
    """It starts again while there are new checkpoints."""
    failed = "failed"


def after(code: int | None) -> After:
    """What the end of a process means. `code`: as a shell has it, 128 + the number of the signal that killed it; None
    for a process that was lost without any.

    Whatever is not listed is a loss: a program that was killed (137, 139, 134), a container whose node was lost (255).
    """
    if code == 0:
        return After.done
    if code in ALWAYS:
        return After.again
    return After.failed if code in FINAL else After.lost


def goes_on(code: int | None, progress: bool, lost: int) -> tuple[bool, int]:
    """Whether a run that has ended so starts again, and its losses in a row without a new checkpoint, this one counted.

    `progress`: whether there is a new checkpoint since the end before. `lost`: what this returned then.
    """
    what = after(code)
    lost = (0 if progress else lost) + (what is After.lost)
    return what is After.again or (what is After.lost and lost < MOST), lost


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> int:
    """The step of the newest one; 0 where there is none."""
    try:
        names = os.listdir(os.path.join(run_dir, "checkpoints"))
    except OSError:
        return 0
    return max((int(name.removeprefix("step_")) for name in names if re.fullmatch(r"step_[0-9]+", name)), default=0)
