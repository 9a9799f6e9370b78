"""The side of a contestant: it waits for its turns on standard input, and answers each on standard output.

Knows nothing of dtf; `bench.contest` is the other side.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

Run = Callable[[int], float | None]
"""Do so many steps; returns the mean loss of their rows over all ranks, or None where none is told."""


class Turns:
    """Make it before anything prints: what is printed later goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began = self._cpu = 0.0
        self._marks: list[float] = []

    def ready(self, **facts: Any) -> None:
        """Say that a turn may begin."""
        self._say(facts)

    def begin(self) -> int:
        """Wait for a turn; its steps, or 0 where no more follow."""
        line = sys.stdin.readline()
        self._marks = []
        self._cpu, self._began = time.process_time(), time.perf_counter()
        return int(line or 0)

    def mark(self) -> None:
        """A step begins, or the last one has ended: the shortest step of the turn is told then."""
        self._marks.append(time.perf_counter())

    def end(self, loss: float | None) -> None:
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        steps = [after - before for before, after in pairwise(self._marks)]
        self._say({"seconds": seconds, "cpu": cpu, "loss": loss, "shortest": min(steps, default=0.0)})

    def serve(self, run: Run) -> None:
        """All turns."""
        while steps := self.begin():
            self.end(run(steps))

    def fail(self, error: BaseException) -> None:
        self._say({"error": f"{type(error).__name__}: {error}"})

    def _say(self, what: dict[str, Any]) -> None:
        self._answers.write(json.dumps(what) + "\n")
        self._answers.flush()


def contestant(main: Callable[[Turns], None]) -> None:
    """The main function of a contestant's module."""
    turns = Turns()
    try:
        main(turns)
    except Exception as error:
        turns.fail(error)
        raise SystemExit(1) from error
    turns._answers.close()
    os._exit(0)  # process groups and thread pools of frameworks need not be taken down
