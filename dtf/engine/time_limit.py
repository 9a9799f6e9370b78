"""The time limit of a run's allocation: how long before it a run has to save, by the saves that it has made."""

from __future__ import annotations

import math
import time
from typing import Protocol

from dtf.core.errors import OutOfTime, Preempted
from dtf.core.run_record import SAVE_TIMES
from dtf.core.text import time_text

END_S = 5.0
"""What follows a save: ranks end, and the script that a scheduler runs decides whether the job goes on."""


class Peers(Protocol):
    """Some ranks by their collective operations. See `dtf.World`, which has them."""

    def gather(self, value: float) -> list[float] | None: ...


class TimeLimit:
    """Counts down to `deadline`, in seconds since 1970; infinite: there is none. Each rank has one, and rank 0 decides.

    From here on the seconds are those of this process: a clock that is set does not move the limit. `guess_s`: what a
    save is given before one was measured.
    """

    def __init__(self, deadline: float = math.inf, guess_s: float = 0.0) -> None:
        self._ends = time.monotonic() + deadline - time.time()
        self._save_s, self._longest_s, self._stopping = guess_s, 0.0, False

    def agree(self, world: Peers, saves: bool, longest_s: float | None) -> None:
        """Take the earliest limit of all ranks: their allocations may differ. Collective.

        `saves`: whether there is anything to save. `longest_s`: the longest save of the run before, if one is known.
        """
        left = world.gather(self._left_s())
        if left:
            self._ends = time.monotonic() + min(left)
        if not saves:
            self._save_s = 0.0
        elif longest_s is not None:
            self.saved(longest_s)

    def saved(self, seconds: float) -> None:
        """A save took so long, until it was complete."""
        self._longest_s = max(self._longest_s, seconds)
        self._save_s = SAVE_TIMES * self._longest_s

    def spare_s(self, mirror_s: float = 0.0) -> float:
        """Seconds until a save has to begin; negative once it is late. `mirror_s`: the longest that the mirror took."""
        return self._left_s() - self._save_s - SAVE_TIMES * mirror_s - END_S

    @property
    def is_over(self) -> bool:
        """Whether this process has to end now, whatever it does."""
        return self._left_s() < END_S

    def stop(self) -> str:
        """The run stops because of the limit: what it still waits for has to end before. Returns a line for people."""
        self._stopping = True
        took = f"; the longest save took {self._longest_s:.2f} s" if self._longest_s else ""
        return f"stopped {time_text(max(0.0, self._left_s()))} before the time limit of this allocation{took}"

    def until_killed_s(self) -> float:
        """Seconds until this process is killed, once the run stops because of the limit; infinite before."""
        return self._left_s() - END_S if self._stopping else math.inf

    def explained(self, error: BaseException, starts: bool) -> BaseException:
        """The error of a rank that was not told to stop, in other words where it is the limit that stops it. `starts`:
        it has not begun its work.
        """
        if not isinstance(error, Preempted) or self._stopping or not self.is_over:
            return error
        if starts:
            return OutOfTime(
                "the time limit of the allocation leaves no time for a start; nothing is lost; start again with more "
                "time"
            )
        return Preempted(f"the time limit of the allocation is reached; {error}")

    def row(self) -> dict[str, str]:
        """For the start-up table, where there is a limit."""
        if self._ends == math.inf:
            return {}
        text = f"in {time_text(max(0.0, self._left_s()))}"
        return {"time limit": f"{text}; the run saves and stops {time_text(self._save_s + END_S)} before"}

    def _left_s(self) -> float:
        return self._ends - time.monotonic()
