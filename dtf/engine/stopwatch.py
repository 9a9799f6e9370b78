"""Wall time of a run, as it is reported."""

from __future__ import annotations

import time


class Stopwatch:
    """Wall time, total and between reports; pauses for what is not training."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def lap(self) -> float:
        """Seconds since the last call, without pauses."""
        now = time.perf_counter()
        passed, self._lap = now - self._lap, now
        return max(passed, 1e-9)

    def paused(self) -> _Pause:
        """A context that does not count."""
        return _Pause(self)

    def shift(self, seconds: float) -> None:
        """Leave so many seconds out."""
        self._lap += seconds


class _Pause:
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._watch.shift(time.perf_counter() - self._started)
