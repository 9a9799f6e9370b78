"""Learning rate schedules: pure functions of the step, and of how many evaluations brought no new best.

A schedule has no state, so a resumed run just asks it again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from dtf.api.registry import option, register
from dtf.core.errors import ConfigError


class Schedule(ABC):
    """A learning rate schedule. Fields are the config node `lr`."""

    @abstractmethod
    def __call__(self, step: int, total: int) -> float:
        """The learning rate of the step that follows `step` finished ones, in a run of `total` steps."""

    def fall(self, waited: int) -> float:
        """The factor on the learning rate from here on, after `waited` evaluations in a row without a new best.

        Default: 1.
        """
        return 1.0

    def check(self) -> None:
        """Raise ConfigError for values that make no schedule. Default: the ranges of the fields are enough."""


def ramp(step: int, warmup: int) -> float:
    """Share of the peak during linear warm-up, in (0, 1]. Source: Goyal et al. 2017, section 2.2 (arXiv:1706.02677)."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def steps_of_rise(schedule: Schedule, total: int) -> int:
    """Steps of a run of `total` before the one with which the rate has stopped to rise. 0 where it rises to the end."""
    step = 0
    while step + 1 < total and schedule(step + 1, total) > schedule(step, total):
        step += 1
    return step if step + 1 < total else 0


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """ConfigError in the form `lr.peak=-1 must be a positive number` unless `holds`."""
    if not holds:
        raise ConfigError(f"lr.{key}={value} must be {rule}")


def check_peak(peak: float) -> None:
    require(0.0 < peak < math.inf, "peak", peak, "a positive number, e.g. 0.1")


def check_warmup(warmup: int) -> None:
    require(warmup >= 0, "warmup", warmup, "a number of steps; use 0 for none")


@register("lr", "constant")
class Constant(Schedule):
    """Warm up linearly to `peak`, then stay there."""

    peak: float = option(default=0.1, doc="learning rate after warm-up")
    warmup: int = option(default=0, doc="linear warm-up", unit="steps")

    def check(self) -> None:
        check_peak(self.peak)
        check_warmup(self.warmup)

    def __call__(self, step: int, total: int) -> float:
        return self.peak * ramp(step, self.warmup)


@register("lr", "plateau")
class Plateau(Schedule):
    """Warm up linearly to `peak`, then stay there until evaluations find no new best: the rate is multiplied by
    `factor` each time that happens.

    The best is that of the run's objective, as for train.early_stop.
    """

    peak: float = option(default=0.1, doc="learning rate after warm-up")
    warmup: int = option(default=0, doc="linear warm-up", unit="steps")
    factor: float = option(default=0.1, doc="what the rate is multiplied by")
    patience: int = option(
        default=1,
        least=1,
        doc="evaluations in a row without a new best that make the rate fall, and fall again",
        unit="evaluations",
    )

    def check(self) -> None:
        check_peak(self.peak)
        check_warmup(self.warmup)
        require(0.0 < self.factor < 1.0, "factor", self.factor, "greater than 0 and less than 1, e.g. 0.1")

    def __call__(self, step: int, total: int) -> float:
        return self.peak * ramp(step, self.warmup)

    def fall(self, waited: int) -> float:
        return 1.0 if waited % self.patience else self.factor


@register("lr", "cosine")
class Cosine(Schedule):
    """Warm up linearly to `peak`, then follow half a cosine to `floor`, which would be the rate of the step after the
    last.

    Source: Loshchilov & Hutter 2017, eq. 5 (arXiv:1608.03983).
    """

    peak: float = option(default=0.1, doc="learning rate after warm-up")
    warmup: int = option(default=0, doc="linear warm-up", unit="steps")
    floor: float = option(default=0.0, doc="learning rate at the end")

    def check(self) -> None:
        check_peak(self.peak)
        check_warmup(self.warmup)
        require(0.0 <= self.floor <= self.peak, "floor", self.floor, f"between 0 and lr.peak={self.peak}")

    def __call__(self, step: int, total: int) -> float:
        if step < self.warmup:
            return self.peak * ramp(step, self.warmup)
        progress = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@register("lr", "step")
class Step(Schedule):
    """Warm up linearly to `peak`, then multiply by `factor` at each boundary.

    Boundaries are shares of the run, not steps or epochs, so that they stay where they belong when the length of the
    run or the global batch changes: He et al. 2016 cut at 32k and 48k of 64k steps, here 0.5 and 0.75
    (arXiv:1512.03385, section 4.2).
    """

    peak: float = option(default=0.1, doc="learning rate after warm-up")
    warmup: int = option(default=0, doc="linear warm-up", unit="steps")
    boundaries: list[float] = option(
        factory=lambda: [0.5, 0.75],
        doc="where the rate falls, ascending, each between 0 and 1",
        unit="share of the run",
    )
    factor: float = option(default=0.1, doc="what the rate is multiplied by at each boundary")

    def check(self) -> None:
        check_peak(self.peak)
        check_warmup(self.warmup)
        ascending = all(low < high for low, high in zip([0.0, *self.boundaries], [*self.boundaries, 1.0], strict=True))
        require(
            ascending, "boundaries", self.boundaries, "ascending shares of the run between 0 and 1, e.g. [0.5,0.75]"
        )
        require(0.0 < self.factor <= 1.0, "factor", self.factor, "greater than 0 and at most 1, e.g. 0.1")

    def __call__(self, step: int, total: int) -> float:
        passed = sum(step >= round(boundary * total) for boundary in self.boundaries)
        return self.peak * ramp(step, self.warmup) * self.factor**passed


@register("lr", "onecycle")
class OneCycle(Schedule):
    """Rise in a line from `peak * start` to `peak` during the share `rise` of the run, then fall in a line to `peak *
    final`.

    The first step has the start rate, the last of several the final one. Equals torch's OneCycleLR with
    `anneal_strategy="linear"`, whose `final_div_factor` counts from the start rate. Source: Smith & Topin 2017, section
    3 (arXiv:1708.07120).
    """

    peak: float = option(default=0.1, doc="largest learning rate")
    rise: float = option(default=0.3, doc="length of the rise", unit="share of the run")
    # Next to nothing, where torch has 0.04: amplified rounding grows with the first rates, see docs/same-numbers.md.
    start: float = option(default=1e-4, doc="first rate", unit="share of the peak")
    final: float = option(default=4e-6, doc="last rate", unit="share of the peak")

    def check(self) -> None:
        check_peak(self.peak)
        require(0.0 <= self.rise < 1.0, "rise", self.rise, "a share of the run, at least 0 and below 1")
        require(0.0 < self.start <= 1.0, "start", self.start, "a share of the peak, greater than 0 and at most 1")
        require(0.0 < self.final <= 1.0, "final", self.final, "a share of the peak, greater than 0 and at most 1")

    def __call__(self, step: int, total: int) -> float:
        last = max(0, total - 1)
        top = max(0.0, self.rise * total - 1)
        if step < top:
            return self.peak * _line(self.start, 1.0, step / top)
        return self.peak * _line(1.0, self.final, min(1.0, (step - top) / (last - top)) if last > top else 0.0)


def _line(low: float, high: float, progress: float) -> float:
    return low * (1.0 - progress) + high * progress


@register("lr", "geometric")
class Geometric(Schedule):
    """Multiply by the same factor in each step, from `peak * start` to `peak`: the range test of job=tune.

    Source: Smith 2017, section 3.3 (arXiv:1506.01186), there in a line; a geometric rise gives each power of ten the
    same number of steps.
    """

    peak: float = option(default=10.0, doc="last rate")
    start: float = option(default=1e-8, doc="first rate", unit="share of the peak")

    def check(self) -> None:
        check_peak(self.peak)
        require(0.0 < self.start <= 1.0, "start", self.start, "a share of the peak, greater than 0 and at most 1")

    def __call__(self, step: int, total: int) -> float:
        return self.peak * self.start ** (1.0 - min(1.0, step / max(1, total - 1)))
