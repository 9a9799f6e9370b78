"""Leases: pieces of work that are granted to trainers, which may join, die and join again.

Pure: it has no clock and no socket; callers pass the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from dtf.core.types import Train

TRAIN, EVALUATE = 0, 1


class Lease(NamedTuple):
    """One share of the rows of a step, or of several steps in a row; or one batch of an evaluation."""

    kind: int
    step: int  # the first one's; of an evaluation its number
    part: int  # the share, or the number of the batch
    shares: int  # into how many the rows are divided
    tickets: tuple[Train, ...]

    @property
    def key(self) -> Key:
        return (self.kind, self.step, self.part)


Key = tuple[int, int, int]
"""Kind, step and part: identify a piece of work, whichever trainer does it."""


class Ledger:
    """Who holds which lease. Each lease that is opened is finished once, however often it has to be granted."""

    def __init__(self) -> None:
        self._free: dict[Key, Lease] = {}
        self._held: dict[Key, tuple[int, Lease]] = {}
        self._heard: dict[int, float] = {}
        self._launch_ids: dict[int, str] = {}
        self.ever_joined: set[int] = set()
        """Trainers that have ever joined."""
        self.opened = self.granted = self.finished = self.regranted = 0

    def open(self, work: Iterable[Lease]) -> None:
        """Add work that any trainer may be granted."""
        for lease in work:
            self._free[lease.key] = lease
            self.opened += 1

    def join(self, trainer: int, now: float, launch_id: str = "") -> None:
        """A trainer begins. The leases of an earlier trainer of this number are free again.

        `launch_id`: the command that started the trainer.
        """
        self.leave(trainer)
        self._heard[trainer], self._launch_ids[trainer] = now, launch_id
        self.ever_joined.add(trainer)

    def other_heard_at(self, trainer: int, launch_id: str) -> float | None:
        """When the trainer of this number was heard last, if another command started it; else None."""
        return None if self._launch_ids.get(trainer, launch_id) == launch_id else self._heard[trainer]

    def leave(self, trainer: int) -> None:
        """Remove a trainer; its leases are free again."""
        self._heard.pop(trainer, None)
        self._launch_ids.pop(trainer, None)
        for key in [key for key, (holder, _) in self._held.items() if holder == trainer]:
            self._free[key] = self._held.pop(key)[1]
            self.regranted += 1

    def renew(self, trainer: int, now: float, launch_id: str = "") -> bool:
        """A trainer was heard. False for one that is not a member any more, and has to join again."""
        if self._launch_ids.get(trainer) != launch_id:
            return False
        self._heard[trainer] = now
        return True

    def expire(self, before: float) -> list[int]:
        """Remove the trainers that were last heard before the time `before`; returns them."""
        silent = [trainer for trainer, heard in self._heard.items() if heard < before]
        for trainer in silent:
            self.leave(trainer)
        return silent

    def grant(self, trainer: int, most: int, has: Collection[Key] = ()) -> list[Lease]:
        """Leases of the trainer that it does not have, as the answer was lost; and free ones, the first steps first, up
        to `most` leases in all.

        Share `part` of a step goes to the trainer at place `part` modulo the members, the same one every step: what a
        trainer has read ahead is then what it needs. All else goes to any trainer that asks.
        """
        lost = [lease for key, (holder, lease) in self._held.items() if holder == trainer and key not in has]
        members = sorted(self._heard)
        place = members.index(trainer)
        eligible = [
            lease
            for lease in self._free.values()
            if lease.kind == EVALUATE or lease.shares == 1 or lease.part % len(members) == place
        ]
        chosen = sorted(eligible, key=lambda lease: lease.key)[: max(0, most - len(lost))]
        for lease in chosen:
            self._held[lease.key] = (trainer, self._free.pop(lease.key))
            self.granted += 1
        return lost + chosen

    def finish(self, key: Key) -> bool:
        """A piece of work is done. False when it was done before, or was never opened."""
        if self._free.pop(key, None) is None and self._held.pop(key, None) is None:
            return False
        self.finished += 1
        return True

    def idle(self) -> bool:
        """Whether no work is left."""
        return not self._free and not self._held

    def members(self) -> list[int]:
        """Trainers that have joined and were not removed, sorted."""
        return sorted(self._heard)

    def held(self) -> Iterable[tuple[Key, int]]:
        """Leases that are granted, by key, and the trainer of each."""
        return [(key, holder) for key, (holder, _) in self._held.items()]
