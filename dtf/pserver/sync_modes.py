"""The modes of a parameter server: rules that say when pushes become an update.

Pure; knows no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class ArrivedPush(Protocol):
    """A push in the basket of those that are not applied yet."""

    @property
    def step(self) -> int: ...
    @property
    def part(self) -> int: ...


PendingShares = Mapping[int, Collection[int]]
"""First step of each lease -> shares that are open and not merged yet."""


class SyncMode(ABC):
    """A mode as a rule over the pushes that have arrived."""

    synchronous = False
    """Whether each step is one update, of all its shares summed in their order, with the same numbers as any
    synchronous strategy.
    """

    collective = False
    """Whether all servers merge the same pushes into the same sequence of updates. Then the norm of the whole gradient
    is known.
    """

    immediate = False
    """Whether each push is an update by itself. A pull in the same message then waits for that update."""

    local_training = False
    """Whether trainers train locally and push changes of the state in place of gradients."""

    steps = 1
    """How many steps a lease has."""

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness

    @abstractmethod
    def shares(self, trainers: int) -> int:
        """Into how many leases the rows of a step are cut."""

    @abstractmethod
    def window(self, trainers: int) -> int:
        """How many leases of a share, one after the other, may be open beside the one that is opened next."""

    @abstractmethod
    def ready(self, basket: Sequence[ArrivedPush], waiting: PendingShares) -> int:
        """How many pushes, from the start of the basket, make the next update; 0: wait for more.

        `basket`: pushes for shares in `waiting`.
        """


class Sync(SyncMode):
    """All shares of a step make one update. The next two steps are open meanwhile: rows of one can be read, and the
    answer to a push brings the other.
    """

    synchronous = collective = True

    def shares(self, trainers: int) -> int:
        return trainers

    def window(self, trainers: int) -> int:
        return 2

    def ready(self, basket: Sequence[ArrivedPush], waiting: PendingShares) -> int:
        step = min(waiting, default=None)
        arrived = sum(push.step == step for push in basket)
        return arrived if step is not None and arrived == len(waiting[step]) else 0


class Async(SyncMode):
    """Each push is an update, as it arrives; a lease is a whole global batch."""

    immediate = True

    def shares(self, trainers: int) -> int:
        return 1

    def window(self, trainers: int) -> int:
        return 2 * trainers if self._staleness is None else self._staleness

    def ready(self, basket: Sequence[ArrivedPush], waiting: PendingShares) -> int:
        return 1 if basket else 0


class HalfAsync(SyncMode):
    """As many pushes as there are trainers, of any of them, make one update; fewer when no more can come."""

    def __init__(self, staleness: int | None) -> None:
        super().__init__(staleness)
        self.collective = staleness == 0

    def shares(self, trainers: int) -> int:
        self._trainers = trainers
        return trainers

    def window(self, trainers: int) -> int:
        return 1 if self._staleness is None else self._staleness

    def ready(self, basket: Sequence[ArrivedPush], waiting: PendingShares) -> int:
        needed = min(self._trainers, sum(len(parts) for parts in waiting.values()))
        return needed if len(basket) >= needed else 0


class Geo(SyncMode):
    """Local training: pushes are changes of the state with which a trainer began. Each is added as it arrives, or, with
    a staleness of 0, all of the same steps at once.
    """

    local_training = True

    def __init__(self, staleness: int | None, steps: int) -> None:
        super().__init__(staleness)
        self.steps = steps

    def shares(self, trainers: int) -> int:
        return trainers

    def window(self, trainers: int) -> int:
        return 1 if self._staleness is None else self._staleness

    def ready(self, basket: Sequence[ArrivedPush], waiting: PendingShares) -> int:
        if self._staleness == 0:
            return len(basket) if len(basket) == sum(len(parts) for parts in waiting.values()) else 0
        return 1 if basket else 0
