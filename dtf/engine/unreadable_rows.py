"""Training rows that ranks could not read: how many an epoch may have, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from dtf.api.leased_work import LeasedWork
from dtf.core.errors import DataError, by_all
from dtf.core.types import Batches


class UnreadableRows:
    """Counts them by epochs, from one judgement to the next. All ranks judge at the same steps."""

    def __init__(self, train: Batches, leased: LeasedWork) -> None:
        self._train, self._leased = train, leased
        # epochs in the order of all ranks -> whether they had a step since the last judgement; the others had one since
        # that before, since servers hear late of the rows of a step
        self._epochs: dict[int, bool] = {}

    def trained(self, epoch: int) -> None:
        """Called at each step."""
        self._epochs[epoch] = True

    def here(self) -> list[int]:
        """Of each epoch that is to be judged, those of this rank: as many numbers on each rank."""
        return [self._train.bad(epoch) + self._leased.unread("train", epoch) for epoch in self._epochs]

    def judge(self, everywhere: Sequence[float]) -> None:
        """Take the sum of `here` over ranks. DataError on all ranks alike when an epoch has more than allowed."""
        self._epochs = {epoch: False for epoch, recent in self._epochs.items() if recent}
        refuse_unreadable(max(everywhere, default=0), self._train.allowed, "training")


def refuse_unreadable(rows: float, allowed: int, split: str) -> None:
    """Raise DataError on all ranks alike when more rows are unreadable, over all ranks, than allowed."""
    if rows > allowed:
        text = f"{rows:g} {split} rows cannot be read, recipe.data.bad_share allows {allowed}"
        raise by_all(DataError(f"{text}; the logs of the ranks name them; repair the data"))
