"""Which trials of a sweep go on, and which stop early: pure functions of what the trials have reached.

A trial stops at rungs, some of its evaluations, and waits there, saved. Nothing here starts or reads anything, so that
a sweep that was killed decides from the trials' folders as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

from dtf.api.options import Prune


class Phase(Enum):
    """What a trial does."""

    cut = "cut"  # it has begun, or been given up before its rung, and goes on as soon as there is a place
    running = "running"
    waiting = "waiting"  # at a rung, saved
    pruned = "pruned"  # the same for good
    finished = "finished"
    failed = "failed"


@dataclass(frozen=True)
class Standing:
    """How far a trial has come. `values`: its objective after each evaluation, in order; NaN where not finite."""

    phase: Phase
    values: Sequence[float] = ()

    def passed(self, rungs: Sequence[int]) -> int:
        """How many rungs it has come to."""
        return sum(len(self.values) >= rung for rung in rungs)

    def at(self, number: int, rungs: Sequence[int]) -> float | None:
        """Its objective at a rung; NaN for one that failed on the way there. None: it is not there yet.

        What ended well before the rung has its last value there.
        """
        if len(self.values) >= rungs[number]:
            return self.values[rungs[number] - 1]
        if self.phase is Phase.finished and self.values:
            return self.values[-1]
        return math.nan if self.phase is Phase.failed and self.passed(rungs) == number else None


Standings = Mapping[int, Standing]
"""Number of a trial -> its standing."""


def rungs(evaluations: int, factor: int, trials: int | None = None, first: int = 1) -> list[int]:
    """The evaluations at which a trial of so many may stop, the last of them: 1/factor^k of all, rounded down.

    `trials`: how many there are; there are no more rungs than leave one of them at the last. `first`: the first
    evaluation that tells trials apart. Rungs before it are left out; where that are all, it is the only one.
    """
    found, most = [evaluations], math.inf if trials is None else _power(trials, factor) + 1
    while found[0] >= factor and len(found) < most:
        found.insert(0, evaluations // factor ** len(found))
    if len(found) == 1 or first >= evaluations:
        return found
    later = [rung for rung in found if rung >= first]
    return later if len(later) > 1 else [first, evaluations]


def next_of(rule: Prune, trials: Standings, rungs: Sequence[int], factor: int, maximise: bool) -> int | None:
    """The waiting trial that goes on now; None: there is none, a new one may start."""
    if rule is Prune.asha:
        return _promoted(trials, rungs, factor, maximise)
    waiting = (number for number, trial in trials.items() if trial.phase is Phase.waiting)
    return next((number for number in waiting if not is_out(rule, number, trials, maximise)), None)


def is_out(rule: Prune, number: int, trials: Standings, maximise: bool) -> bool:
    """Whether a waiting trial will not go on, whatever the others come to. Never under `asha`.

    Source: Golovin et al. 2017, Google Vizier, section 3.2.2: a trial stops whose best objective by a step is worse
    than the median of the running averages, up to this step, of the trials that have finished.
    """
    if rule is not Prune.median:
        return False
    own = trials[number].values
    finished = (trial.values[: len(own)] for trial in trials.values() if trial.phase is Phase.finished)
    averages = [fmean(finite) for values in finished if (finite := [*filter(math.isfinite, values)])]
    if not averages:
        return False
    best = [*filter(math.isfinite, own)]
    if not best:
        return True
    return max(best) < median(averages) if maximise else min(best) > median(averages)


def champion(trials: Standings, rungs: Sequence[int], maximise: bool) -> int | None:
    """The best of those that wait at the highest rung, which is to be trained to its end where nothing else has been.
    None where one has, or none waits.
    """
    if any(trial.phase is Phase.finished for trial in trials.values()):
        return None
    waiting = {number: trial for number, trial in trials.items() if trial.phase is Phase.waiting and trial.values}
    order = _order(maximise)
    return min(
        waiting,
        key=lambda number: (-waiting[number].passed(rungs), order(waiting[number].values[-1]), number),
        default=None,
    )


def _promoted(trials: Standings, rungs: Sequence[int], factor: int, maximise: bool) -> int | None:
    """Source: Li et al. 2020 (arXiv:1810.05934), algorithm 2: of all that have come to a rung, the best 1/factor go on
    to the next; the highest rung first.
    """
    order = _order(maximise)
    for rung in reversed(range(len(rungs) - 1)):
        come = {number: value for number, trial in trials.items() if (value := trial.at(rung, rungs)) is not None}
        best = sorted(come, key=lambda number: (order(come[number]), number))[: len(come) // factor]
        for number in best:
            here = trials[number].phase is Phase.waiting and trials[number].passed(rungs) == rung + 1
            if here and math.isfinite(come[number]):
                return number
    return None


def _order(maximise: bool) -> Callable[[float], tuple[bool, float]]:
    """A key that sorts the best first and what is not finite last."""
    return lambda value: (not math.isfinite(value), (-value if maximise else value) if math.isfinite(value) else 0.0)


def _power(number: int, factor: int) -> int:
    """The largest k with factor^k <= number."""
    power = 0
    while factor ** (power + 1) <= number:
        power += 1
    return power
