"""Which checkpoints of a run stay, and the removal of the others. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from dtf.checkpoint.manifest import Objective
from dtf.checkpoint.storage import checkpoints, discard, read_manifest, step_of
from dtf.core.errors import DataError


class Retention(NamedTuple):
    """The rule of a run."""

    keep_last: int
    keep_best: int
    objective: tuple[str, str]
    """Metric, and `max` or `min`."""

    trusted: int | None = None
    """The newest up to this step is kept too."""

    def kept(self, complete: Mapping[int, Objective | None]) -> set[int]:
        """The steps to keep of complete checkpoints: the newest ones, of which there is always one, and the best.

        Of equals the older is better, as for the run itself.
        """
        steps = sorted(complete)
        sign = -1.0 if self.objective[1] == "max" else 1.0
        ranked = [
            (sign * goal.value, step)
            for step in steps
            if (goal := complete[step]) is not None
            and (goal.metric, goal.mode) == self.objective
            and math.isfinite(goal.value)
        ]
        best = {step for _, step in sorted(ranked)[: self.keep_best]}
        if self.trusted is not None:
            best.update([step for step in steps if step <= self.trusted][-1:])
        return best.union(steps[-max(1, self.keep_last) :])


def retain(parent: Path, run_id: str, rule: Retention, spared: Collection[Path] = frozenset()) -> list[Path]:
    """Remove the checkpoints in `parent` that the rule does not keep; returns those removed, newest first.

    Counts only complete ones, and touches only those: what cannot be read, or is `spared`, is left, and does not count.
    A checkpoint leaves by a rename first, so that a half removed one is never met.
    """
    complete: dict[int, Objective | None] = {}
    for folder in checkpoints(parent):
        if folder in spared:
            continue
        try:
            complete[step_of(folder.name) or 0] = read_manifest(folder).objective
        except (DataError, NotADirectoryError):
            continue
    kept, removed = rule.kept(complete), []
    for folder in checkpoints(parent):
        step = step_of(folder.name) or 0
        if step in complete and step not in kept:
            discard(folder, run_id)
            removed.append(folder)
    return removed
