"""Searches for the largest micro-batch that fits into memory, and keeps the host alive meanwhile."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dtf.core.text import bytes_text
from dtf.host.memory import available_bytes
from dtf.host.usage import process_tree

FIRST_ROWS = 8
HEADROOM = 0.9
"""The share of what is free that a run may take on a CPU: other programs need some, and its own needs vary."""
_FINENESS = 16  # the answer is within a sixteenth of the largest
_LOOK_S = 0.02
_FIRST_TO_GO = "1000"  # of oom_score_adj: the kernel takes such a process before any other
_WANTS_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|killed by SIGKILL", re.IGNORECASE
)


@dataclass(frozen=True)
class Trial:
    """What became of a micro-batch of so many rows."""

    rows: int
    fits: bool
    planned: int | None = None  # bytes of the process that needs most, before its first step
    peak: int | None = None  # measured, of the process that took most
    rows_per_s: float | None = None
    why: str = ""  # why it does not fit


def wants_memory(text: str) -> bool:
    """Whether an error says that there was not enough memory."""
    return bool(_WANTS_MEMORY.search(text))


def search(
    most: int, unit: int, try_rows: Callable[[int], Trial], expected: Callable[[list[Trial], int], str]
) -> list[Trial]:
    """Double the rows until they do not fit or are `most`, then halve the rest. All in multiples of `unit`, but for
    `most` itself. `expected` says why a number of rows cannot fit, by the trials so far, so that it is not tried.
    """
    trials: list[Trial] = []

    def fits(rows: int) -> bool:
        why = expected(trials, rows)
        trials.append(Trial(rows, False, why=why) if why else try_rows(rows))
        return trials[-1].fits

    def whole(rows: int) -> int:
        return max(unit, rows // unit * unit)

    good, bad, rows = 0, None, min(whole(FIRST_ROWS), most)
    while bad is None and rows > good:
        if fits(rows):
            good, rows = rows, min(2 * rows, most)
        else:
            bad = rows
    while bad is not None and bad - good > max(unit, good // _FINENESS):
        rows = whole((good + bad) // 2)
        if not good < rows < bad:
            break
        if fits(rows):
            good = rows
        else:
            bad = rows
    return trials


def expected_bytes(trials: list[Trial], rows: int) -> float | None:
    """What a process will take with so many rows: the plan goes on in a line, and so does what was measured; the larger
    of the two. None where there were no two trials.
    """
    known = sorted((trial.rows, trial.planned or 0, trial.peak or 0) for trial in trials if trial.fits and trial.peak)
    if len(known) < 2:
        return None
    (few, few_planned, few_peak), (more, planned, peak) = known[-2:]
    share = (rows - more) / (more - few)
    return max(peak + share * (planned - few_planned), peak + share * max(0, peak - few_peak))


def refusal(free: int | None, processes: int) -> Callable[[list[Trial], int], str]:
    """`expected` for a CPU host with so many bytes free, of which all processes take their part."""

    def why(trials: list[Trial], rows: int) -> str:
        need = expected_bytes(trials, rows)
        if free is None or need is None or need * processes <= HEADROOM * free:
            return ""
        return f"{bytes_text(round(need))} expected for each of {processes} processes, {bytes_text(free)} are free"

    return why


class HostGuard:
    """While it is open, ranks that this process starts are the first to go when memory is short: the kernel takes them
    before others, and this process ends them before it must. `struck`: whether it has.
    """

    def __init__(self, free: int | None) -> None:
        self._least = None if free is None else (1 - HEADROOM) / 2 * free
        self._over = threading.Event()
        self._marked: set[int] = set()
        self._others: set[int] = set()
        self.struck = False

    def __enter__(self) -> Self:
        self._others = set(_ranks())
        self._thread = threading.Thread(target=self._watch, name="host-guard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            ranks = [process for process in _ranks() if process not in self._others]
            for process in ranks:
                if process not in self._marked:
                    self._marked.add(process)
                    with suppress(OSError):
                        Path(f"/proc/{process}/oom_score_adj").write_text(_FIRST_TO_GO)
            free = available_bytes()
            if self._least is not None and free is not None and free < self._least:
                for process in ranks:
                    with suppress(OSError):
                        os.kill(process, signal.SIGKILL)
                        self.struck = True


def _ranks() -> Iterator[int]:
    """Processes that processes of this one have started: ranks, which the fork server starts, and not that one."""
    own = os.getpid()
    for number, process in process_tree(own).items():
        if number != own and process.parent != own:
            yield number


def line_of(trial: Trial) -> str:
    """For people."""
    cells: list[Any] = [
        f"{trial.rows:>8} rows",
        f"{bytes_text(trial.planned) if trial.planned else '-':>9} planned",
        f"{bytes_text(trial.peak) if trial.peak else '-':>9} measured",
        f"{trial.rows_per_s:>9,.0f} rows/s" if trial.rows_per_s else f"{'-':>9} rows/s",
    ]
    return "  ".join(cells) + ("" if trial.fits else f"  does not fit: {trial.why}")
