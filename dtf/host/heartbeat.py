"""Heartbeats: what a rank does now, in memory that it shares with the launching process.

Only the last beat is kept. Behind it lies what the rank waits for, see `waits`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from dtf.host import waits

PHASES = ("start", "rendezvous", "fetch", "step", "log", "evaluate", "save", "wait", "stop", "end", "compile")
"""`rendezvous`: it waits for processes that somebody else starts, and says so itself. `wait`: for work that others hand
out. `end`: its work has returned. `compile`: it compiles within another phase, and others may wait for it."""
_NUMBER = {phase: float(number) for number, phase in enumerate(PHASES)}
_BYTES = 32  # of a beat: time, phase, step, beats of phase `step`; float64 each
_CELL = 1 << 18  # per rank: the beat, then the memory of `waits`. Only pages that are written take memory

_cell = memoryview(bytearray(_BYTES)).cast("d")  # of this rank; nobody reads it until `attach`
_compiler_lock, _compilers, _before = threading.Lock(), 0, 0.0  # threads that compile, and the phase before them


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


def still_alive() -> None:
    """This rank is where it was, and works."""
    _cell[0] = monotonic()


@contextmanager
def compiling() -> Iterator[None]:
    """A context in which a thread of this rank compiles. The phase before goes on when no thread does any more."""
    global _compilers, _before
    with _compiler_lock:
        if not _compilers:
            _before = _cell[1]
        _compilers += 1
        _cell[1] = _NUMBER["compile"]
    still_alive()
    try:
        yield
    finally:
        with _compiler_lock:
            _compilers -= 1
            if not _compilers:
                _cell[1] = _before
        still_alive()


def end() -> None:
    """The work of this rank has returned. A process that ends before this has left it by a way of its own."""
    beat("end", int(_cell[2]))


def attach(board: int, rank: int) -> None:
    """From now on this process beats as `rank`. `board`: the file descriptor of a Board."""
    global _cell
    view = memoryview(mmap.mmap(board, _CELL, offset=rank * _CELL))
    _cell = view[:_BYTES].cast("d")
    waits.attach(view[_BYTES:])


class Board:
    """The heartbeats of all ranks, in the launching process. All start in phase `start` as of now."""

    NAME = "dtf-heartbeat"
    """Of its file, among the open files of the launching process."""

    @classmethod
    def opened(cls, path: str) -> Board:
        """The board of another process, to read. `path`: such as /proc/PID/fd/N."""
        board = cls.__new__(cls)
        board.fd = os.open(path, os.O_RDONLY)
        board._memory = mmap.mmap(board.fd, 0, prot=mmap.PROT_READ)
        board._bytes = memoryview(board._memory)
        return board

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create(self.NAME)
        try:
            os.ftruncate(self.fd, ranks * _CELL)
        except OSError as error:  # such as a limit on the size of files
            error.filename = f"memory of {ranks * _CELL:,} bytes that ranks share"
            raise
        self._memory = mmap.mmap(self.fd, 0)
        self._bytes = memoryview(self._memory)
        for rank in range(ranks):
            self.reset(rank)

    def _cell(self, rank: int) -> memoryview:
        return self._bytes[rank * _CELL : (rank + 1) * _CELL]

    def __len__(self) -> int:
        """How many ranks have a place on it."""
        return len(self._bytes) // _CELL

    def reset(self, rank: int) -> None:
        """Back to phase `start` as of now, for a new process of this rank; the old one is dead."""
        cell = self._cell(rank)
        waits.clear(cell[_BYTES:])
        beats = cell[:_BYTES].cast("d")
        for at, value in enumerate((monotonic(), _NUMBER["start"], 0.0, 0.0)):
            beats[at] = value

    def read(self, rank: int) -> Beat:
        """The last beat of a rank."""
        at, phase, step, steps = self._cell(rank)[:_BYTES].cast("d")
        return Beat(at, PHASES[int(phase)], int(step), int(steps))

    def last_sign(self, rank: int) -> float:
        """When a rank last beat, or entered or left an operation."""
        cell = self._cell(rank)
        return max(cell[:8].cast("d")[0], waits.changed(cell[_BYTES:]))

    def position(self, rank: int, last: int = waits.RING) -> waits.Position:
        """Where a rank is among the operations that wait for others, with the `last` ones of them."""
        return waits.read(self._cell(rank)[_BYTES:], last)

    def close(self) -> None:
        """Give the memory back."""
        self._bytes.release()
        self._memory.close()
        os.close(self.fd)
