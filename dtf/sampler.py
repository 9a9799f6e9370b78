"""Which rows make up which global batch: a pure function of (seed, epoch, index). Ranks and restarts change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

from dtf.registry import option, register
from dtf.values import Shard

if TYPE_CHECKING:
    import numpy as np


class Tail(Enum):
    partial = "partial"
    fill = "fill"
    drop = "drop"


class Sampler(ABC):
    """Fields are the config node `sampler`. Torch-free."""

    tail: Tail

    @abstractmethod
    def order(self, rows: int, seed: int, epoch: int) -> np.ndarray:
        """Row numbers of one epoch in the order they are visited, int64."""


@register("sampler", "shuffle")
class Shuffle(Sampler):
    """A new permutation each epoch."""

    tail: Tail = option(
        default=Tail.partial,
        doc="the last global batch of an epoch: `partial` is smaller, `fill` is completed by a random choice of other rows, `drop` leaves it out",
    )

    def order(self, rows: int, seed: int, epoch: int) -> np.ndarray:
        import numpy as np

        from dtf.seeding import seed_of

        return np.random.Generator(np.random.Philox(seed_of(seed, "shuffle", epoch))).permutation(rows)


@register("sampler", "sequential")
class Sequential(Sampler):
    """The order of the data set, the same in every epoch."""

    tail: Tail = option(default=Tail.partial, doc="the last global batch of an epoch: `partial` is smaller, `drop` leaves it out, `fill` repeats rows")

    def order(self, rows: int, seed: int, epoch: int) -> np.ndarray:
        import numpy as np

        return np.arange(rows)


class Epochs:
    """The global batches of a split. The order of the current epoch is kept; asking for another epoch draws it anew."""

    def __init__(self, sampler: Sampler, rows: int, batch_size: int, seed: int) -> None:
        self._sampler, self._rows, self._batch_size, self._seed = sampler, rows, batch_size, seed
        self._epoch, self._order = -1, None

    @property
    def batches(self) -> int:
        """Global batches per epoch."""
        whole, rest = divmod(self._rows, self._batch_size)
        return whole + (rest > 0 and self._sampler.tail is not Tail.drop)

    def size(self, index: int) -> int:
        """Rows of global batch `index` of any epoch."""
        left = self._rows - index * self._batch_size
        return self._batch_size if self._sampler.tail is Tail.fill else min(self._batch_size, left)

    def ids(self, epoch: int, index: int) -> np.ndarray:
        """Sample ids of one global batch, in order, int64."""
        import numpy as np

        if epoch != self._epoch:
            order = self._sampler.order(self._rows, self._seed, epoch)
            missing = -len(order) % self._batch_size
            if self._sampler.tail is Tail.fill and missing:
                # The first rows of the order: of other batches, and as random as the order itself; again and again when there are too few.
                order = np.concatenate([order, np.resize(order, missing)])
            self._epoch, self._order = epoch, order
        assert self._order is not None
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]


def cut(rows: int, micro_batch_rows: int) -> list[int]:
    """Bounds of the micro-batches of a global batch: micro-batch k is rows [bounds[k], bounds[k + 1]).

    A smaller last batch has fewer micro-batches, not smaller ones. A last micro-batch of a single row joins the one before it,
    because batch statistics of one value do not exist; the rule does not depend on who computes it.
    """
    bounds = [*range(0, rows, micro_batch_rows), rows]
    if micro_batch_rows > 1 and len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
        del bounds[-2]
    return bounds


def share(micro_batches: int, shard: Shard) -> tuple[int, int]:
    """The run of micro-batches [first, last) that a shard computes; shares differ by at most one."""
    return micro_batches * shard.index // shard.count, micro_batches * (shard.index + 1) // shard.count
