"""When ranks were in which phase: what an undisturbed run did, and the moments of it that trials are disturbed at."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from dtf.host.heartbeat import Beat

BEFORE = "launch"
"""Before the ranks are there: the launching process composes, and makes the fork server."""
_ORDER = ("start", "rendezvous")


@dataclass(frozen=True)
class Stay:
    """A rank in a phase, after `step` finished steps."""

    phase: str
    step: int
    seconds: float


@dataclass(frozen=True)
class Moment:
    """So many seconds after a rank has entered a phase after `step` finished steps."""

    phase: str
    step: int
    after_s: float

    def has_come(self, beat: Beat | None) -> bool:
        """Whether the rank is in that phase, or past it."""
        if self.phase == BEFORE:
            return True
        if beat is None:
            return False
        if self.phase in _ORDER or beat.phase in _ORDER:
            return (self.phase in _ORDER and beat.phase == self.phase) or beat.phase not in _ORDER
        return beat.step > self.step or (beat.step == self.step and beat.phase == self.phase)


class Timeline:
    """Made of beats that are read again and again while a run goes on."""

    def __init__(self) -> None:
        self.stays: dict[int, list[Stay]] = defaultdict(list)
        self._last: dict[int, tuple[str, int, float]] = {}

    def add(self, rank: int, phase: str, step: int, now: float) -> None:
        last = self._last.get(rank)
        if last is not None and last[:2] == (phase, step):
            return
        if last is not None:
            self.stays[rank].append(Stay(last[0], last[1], now - last[2]))
        self._last[rank] = (phase, step, now)

    def finish(self, now: float) -> None:
        """No more beats will come."""
        for rank in list(self._last):
            self.add(rank, "", -1, now)

    def draw(self, rng: random.Random, rank: int, before: bool) -> Moment:
        """A random moment of a random phase. `before`: also before there are ranks."""
        stays: dict[str, list[Stay]] = defaultdict(list)
        for stay in self.stays[rank]:
            if stay.phase != BEFORE or before:
                stays[stay.phase].append(stay)
        chosen = rng.choice(stays[rng.choice(sorted(stays))])
        return Moment(chosen.phase, chosen.step, rng.uniform(0.0, chosen.seconds))

    def longest(self, phase: str) -> float:
        """Seconds of the longest stay in a phase, on any rank."""
        return max(
            (stay.seconds for stays in self.stays.values() for stay in stays if stay.phase == phase), default=0.0
        )

    def to_json(self) -> dict[str, Any]:
        return {
            str(rank): [[s.phase, s.step, round(s.seconds, 6)] for s in stays] for rank, stays in self.stays.items()
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        timeline = cls()
        for rank, stays in data.items():
            timeline.stays[int(rank)] = [Stay(*stay) for stay in stays]
        return timeline
