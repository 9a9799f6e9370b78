"""The budget of a run: the launching process counts its hours over all launches, and marks the end of the budget; then
the ranks save and stop.

The mark is a file in the run folder, which the launching process and the ranks share under every launcher.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from dtf.api.options import BudgetOptions
from dtf.core.errors import DataError

WARN_AT = 0.8
_SECONDS, _MARK = "seconds", ".over_budget"
_TICK_S = 1.0
_LONGEST, _MOST_S = 64, 1e12  # bytes and value of a number


def limit_s(budget: BudgetOptions) -> float:
    """Seconds that the budget buys; infinite without one."""
    hours = math.inf if budget.hours is None else budget.hours
    if budget.cost is not None and budget.cost_per_hour is not None:
        hours = min(hours, budget.cost / budget.cost_per_hour)
    return hours * 3600


def key(budget: BudgetOptions) -> str:
    """The key that ends the run: `budget.cost=5` or `budget.hours=2`, whichever is spent first."""
    by_time = budget.hours is not None and budget.hours * 3600 <= limit_s(budget)
    return f"budget.hours={budget.hours:g}" if by_time else f"budget.cost={budget.cost:g}"


def spent_s(folder: Path) -> float:
    """Seconds that the run in `folder` has taken so far, over all its launches. A killed launch is counted to within a
    second. DataError for a file that does not say them.
    """
    try:
        with (folder / _SECONDS).open("rb") as file:
            text = file.read(_LONGEST)
        seconds = float(text or 0)  # empty: killed as it made the file
    except (FileNotFoundError, NotADirectoryError):
        return 0.0
    except (ValueError, OSError):
        seconds = math.nan
    if not 0 <= seconds < _MOST_S:
        raise DataError(
            f"{folder / _SECONDS} does not say how many seconds the run has taken, so what is left of the budget is "
            "not known; write the number into it, or remove it to count from 0"
        )
    return seconds


def forget_damage(folder: Path) -> str:
    """Remove a file that does not say the seconds of a run of which nothing depends on them; they are then counted from
    0. Returns what was done, for people; empty where all is well.
    """
    try:
        spent_s(folder)
        return ""
    except DataError:
        os.replace(folder / _SECONDS, aside := folder / f"{_SECONDS}.bad")
        return f"{folder / _SECONDS} held no number and is {aside.name} now; the seconds of the run are counted from 0"


def is_spent(folder: Path) -> bool:
    """Whether the budget has ended, so that ranks must save and stop."""
    return (folder / _MARK).exists()


class BudgetMeter:
    """Counts the seconds of a run while the context is open, and writes them into a file of the run folder.

    Warns once near the end of the budget, and marks its end. `elsewhere_s`: how many seconds of the budget other trials
    of a sweep have spent by now. It and `warn` are called from a thread.
    """

    def __init__(
        self, folder: Path, budget: BudgetOptions, elsewhere_s: Callable[[], float], warn: Callable[[str], None]
    ) -> None:
        self._folder, self._budget, self._elsewhere_s, self._warn = folder, budget, elsewhere_s, warn
        self._limit_s, self._before_s, self._opened = limit_s(budget), spent_s(folder), time.monotonic()
        self._warned = elsewhere_s() >= WARN_AT * self._limit_s  # by another trial
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="dtf-meter", daemon=True)

    @property
    def seconds(self) -> float:
        """Of this run, over all its launches."""
        return self._before_s + time.monotonic() - self._opened

    def __enter__(self) -> Self:
        (self._folder / _MARK).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _count(self) -> None:
        descriptor, last = -1, False
        while True:
            with contextlib.suppress(OSError):  # a full disk is the checkpoint's to report
                if descriptor < 0:
                    descriptor = os.open(self._folder / _SECONDS, os.O_WRONLY | os.O_CREAT, 0o600)
                # one write of a text that never gets shorter: a kill leaves a whole number
                os.pwrite(descriptor, f"{self.seconds:.3f}\n".encode(), 0)
            with contextlib.suppress(OSError):
                self._check()
            if last:
                break
            last = self._closed.wait(_TICK_S)
        if descriptor >= 0:
            os.close(descriptor)

    def _check(self) -> None:
        spent = self._elsewhere_s() + self.seconds
        if spent >= self._limit_s:
            (self._folder / _MARK).touch(mode=0o600)
        if spent >= WARN_AT * self._limit_s and not self._warned:
            self._warned = True
            self._warn(
                f"{spent / self._limit_s:.0%} of {key(self._budget)} is spent; at 100% the state is saved and "
                "the ranks stop"
            )
