"""The contract of samplers: in which order an epoch visits its rows. A pure function of (seed, epoch), so that ranks
and restarts change nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.registry import name_of
from dtf.api.schema import KeyProblem

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np


class Tail(Enum):
    """What becomes of the rows at the end of an epoch that do not fill a global batch: a smaller batch (`partial`), a
    batch completed with other rows (`fill`), or no batch (`drop`).
    """

    partial = "partial"
    fill = "fill"
    drop = "drop"


class RowTrait(Enum):
    """What a sampler may need of training rows: a class for each (`Dataset.groups`), further views of each
    (`Dataset.repeats`), and that they can be read one by one (no `Dataset.runs`).
    """

    classes = "classes"
    views = "views"
    single = "single"


def row_traits(repeats: bool, groups: np.ndarray | None, runs: np.ndarray | None) -> set[RowTrait]:
    """The traits of rows whose `Dataset` has these."""
    has = {RowTrait.classes: groups is not None, RowTrait.views: repeats, RowTrait.single: runs is None}
    return {trait for trait, there in has.items() if there}


_MISSING = {
    RowTrait.classes: "balances classes, and the rows of {} have none; give a number per row: sampler.weights=FILE, or "
    "use sampler=shuffle",
    RowTrait.views: "shows rows several times, and the data of {} has one view of each; use sampler=shuffle",
    RowTrait.single: "chooses single rows, and the data of {} are read in runs of rows; use sampler=shuffle, or data "
    "whose rows are read one by one",
}


class Sampler(ABC):
    """Decides in which order rows are visited. Fields are the config node `sampler`. Torch-free."""

    tail: Tail

    once: bool = True
    """Whether each epoch visits each row exactly once."""

    repeats: bool = False
    """Whether `order` also gives ids from `rows` on, which stand for further views of a row. See `Dataset.repeats`."""

    @property
    def needs(self) -> set[RowTrait]:
        """What it needs of the training rows. Default: as `once` and `repeats` say."""
        return ({RowTrait.views} if self.repeats else set()) | (set() if self.once else {RowTrait.single})

    def check_rows(self, traits: Collection[RowTrait], data: str) -> None:
        """Raise KeyProblem where training rows with these traits do not have what this sampler needs. `data`: their
        name, for the message.
        """
        for trait in RowTrait:
            if trait in self.needs and trait not in traits:
                raise KeyProblem("sampler", f"sampler={name_of('sampler', self)} {_MISSING[trait].format(data)}")

    def fingerprint(self) -> str:
        """Text that differs when anything outside these options that decides the order differs, such as a file.
        Default: empty, there is nothing.
        """
        return ""

    @abstractmethod
    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        """The row numbers of one epoch in the order in which they are visited, int64, at most `rows` of them.

        `groups`: the class of each row (rows,), where the data set has classes. A pure function of its arguments.
        """
