"""The learning-rate range test: what a rate can be, told by the loss of one short training in which it rises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

SMOOTHING = 0.98
"""Weight of what was before in the running mean of the loss, as Gugger 2018 and fastai have it."""
_DIVERGED = 4.0  # times the least smoothed loss: the test is over
_BEGINNING = 0.25  # of the steps, whose rates are too small to teach: what the loss is, and how far batches scatter it
_ROUNDING = 1e-6
_SURE = 4.0  # standard errors by which the smoothed loss must fall below its beginning


@dataclass(frozen=True)
class RangeTest:
    """Rates, losses and smoothed losses of the steps up to where training diverged, and what follows of them."""

    rates: list[float]
    losses: list[float | None]  # None where it was not finite
    smoothed: list[float]
    suggestion: float | None  # a tenth of `least_at`; None where the loss did not fall
    least_at: float | None  # the rate at the least smoothed loss
    steepest: float | None  # the rate at which it falls fastest, for each factor of the rate
    diverged: bool  # whether the loss rose so far that larger rates say nothing


def judge(rates: Sequence[float], losses: Sequence[float | None]) -> RangeTest:
    """Smooth the losses and read rates off them.

    A tenth of the rate at the minimum: Howard & Gugger 2020, "Deep Learning for Coders", chapter 5. The running mean
    without bias, and the end at four times the least: Gugger 2018, "How do you find a good learning rate".
    """
    smoothed: list[float] = []
    mean, diverged = 0.0, False
    for count, loss in enumerate(losses, 1):
        if loss is None or not math.isfinite(loss):
            diverged = True
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING**count))
        if count > 1 and smoothed[-1] > _DIVERGED * min(smoothed) > 0:
            diverged = True
            break
    first = max(2, int(_BEGINNING * len(losses)))
    at = range(first, len(smoothed))
    least = min(at, key=lambda step: smoothed[step], default=None)
    if least is None or not _falls([loss for loss in losses[:first] if loss is not None], smoothed[least]):
        return RangeTest(list(rates), list(losses), smoothed, None, None, None, diverged)
    slopes = {
        here: (smoothed[later] - smoothed[here]) / math.log(rates[later] / rates[here])
        for here, later in pairwise(at)
        if later <= least
    }
    steepest = min(slopes, key=lambda step: slopes[step]) if slopes else least
    return RangeTest(list(rates), list(losses), smoothed, rates[least] / 10, rates[least], rates[steepest], diverged)


def _falls(beginning: Sequence[float], least: float) -> bool:
    """Whether a smoothed loss is lower than at the beginning by more than batches scatter it."""
    weight = (1 - SMOOTHING) / (1 + SMOOTHING)  # of a step, in the variance of the running mean
    error = stdev(beginning) * math.sqrt(1 / len(beginning) + weight)
    mean = fmean(beginning)
    return mean - least > _SURE * error + _ROUNDING * abs(mean)


def table(test: RangeTest, rows: int = 12) -> Iterator[str]:
    """Lines for people: the smoothed loss at a few rates, and what is suggested."""
    yield f"{'lr':>10}  {'loss, smoothed':>14}"
    count = len(test.smoothed)
    for step in sorted({round(row * (count - 1) / max(1, rows - 1)) for row in range(rows)} if count else ()):
        mark = "  least" if test.rates[step] == test.least_at else ""
        yield f"{test.rates[step]:>10.2e}  {test.smoothed[step]:>14.4f}{mark}"
    if test.diverged and count < len(test.rates):
        yield f"{test.rates[count]:>10.2e}  training diverges"
    if test.suggestion is None or test.least_at is None or test.steepest is None:
        yield "no suggestion: the loss does not fall by more than batches scatter it; more job.steps, or larger batches"
        return
    yield f"the loss is least at {test.least_at:.2g} and falls fastest at {test.steepest:.2g}"
    if not test.diverged:
        yield "the loss did not rise again: larger rates may train too"
    yield f"suggestion: lr.peak={test.suggestion:.2g}, a tenth of the rate at the least loss"
