"""Heartbeats: what a rank does now, in memory that it shares with the launching process.

Only the last beat is kept.
"""

from __future__ import annotations

import mmap
import os
from time import monotonic
from typing import NamedTuple

PHASES = ("start", "fetch", "step", "log", "evaluate", "save", "wait", "stop")
"""`wait`: for work that others hand out."""
_NUMBER = {phase: float(number) for number, phase in enumerate(PHASES)}
_BYTES = 32  # per rank: time, phase, step, beats of phase `step`; float64 each

_cell = memoryview(bytearray(_BYTES)).cast("d")  # of this rank; nobody reads it until `attach`


class Beat(NamedTuple):
    """The last beat of a rank. `at`: time.monotonic(), which all processes of a host share.

    `steps`: how many steps it began since it was started.
    """

    at: float
    phase: str
    step: int
    steps: int


def beat(phase: str, step: int) -> None:
    """This rank is alive and enters `phase` after `step` finished optimizer steps. Takes less than 1 us."""
    cell = _cell
    cell[1] = _NUMBER[phase]
    cell[2] = step
    if phase == "step":
        cell[3] += 1.0
    cell[0] = monotonic()


def attach(board: int, rank: int) -> None:
    """From now on this process beats as `rank`. `board`: the file descriptor of a Board."""
    global _cell
    view = memoryview(mmap.mmap(board, 0)).cast("d")
    _cell = view[rank * _BYTES // 8 : (rank + 1) * _BYTES // 8]


class Board:
    """The heartbeats of all ranks, in the launching process. All start in phase `start` as of now."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("dtf-heartbeat")
        os.ftruncate(self.fd, ranks * _BYTES)
        self._memory = mmap.mmap(self.fd, 0)
        self._cells = memoryview(self._memory).cast("d")
        for rank in range(ranks):
            self.reset(rank)

    def reset(self, rank: int) -> None:
        """Back to phase `start` as of now, for a new process of this rank; the old one is dead."""
        start = rank * _BYTES // 8
        for at, value in enumerate((monotonic(), _NUMBER["start"], 0.0, 0.0)):
            self._cells[start + at] = value

    def read(self, rank: int) -> Beat:
        """The last beat of a rank."""
        at, phase, step, steps = self._cells[rank * _BYTES // 8 : (rank + 1) * _BYTES // 8]
        return Beat(at, PHASES[int(phase)], int(step), int(steps))

    def close(self) -> None:
        """Give the memory back."""
        self._cells.release()
        self._memory.close()
        os.close(self.fd)
