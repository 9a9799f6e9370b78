"""Which rows make up a global batch and its micro-batches: the same for every strategy and number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.sampler import Sampler, Tail
from dtf.core.types import Shard

if TYPE_CHECKING:
    import numpy as np


class Epochs:
    """The global batches of a split. The order of the current epoch is kept; asking for another epoch computes it
    again.

    `groups`: as in `Sampler.order`. `runs`: as in `Dataset.runs`. The sampler then orders runs, whose rows stay
    together, and no list of all rows is made. `Sampler.check_rows` says which samplers can.
    """

    def __init__(
        self,
        sampler: Sampler,
        rows: int,
        batch_size: int,
        seed: int,
        groups: np.ndarray | None = None,
        runs: np.ndarray | None = None,
    ) -> None:
        self._sampler, self._rows, self._batch_size, self._seed, self._groups, self._runs = (
            sampler,
            rows,
            batch_size,
            seed,
            groups,
            runs,
        )
        self._epoch, self._order, self._ends = -1, None, None

    @property
    def batches(self) -> int:
        """Global batches per epoch."""
        full, rest = divmod(self._rows, self._batch_size)
        return full + (rest > 0 and self._sampler.tail is not Tail.drop)

    def size(self, index: int) -> int:
        """Rows of global batch `index` of any epoch."""
        left = self._rows - index * self._batch_size
        return self._batch_size if self._sampler.tail is Tail.fill else min(self._batch_size, left)

    def ids(self, epoch: int, index: int) -> np.ndarray:
        """Sample ids of one global batch, in order, int64."""
        import numpy as np

        if self._runs is not None:
            return self._ids_of_runs(self._runs, epoch, index)
        if epoch != self._epoch:
            order = self._sampler.order(self._rows, self._seed, epoch, self._groups)
            missing = -len(order) % self._batch_size
            if self._sampler.tail is Tail.fill and missing:
                # The first rows of the order: of other batches, and as random as the order itself; again and again when
                # there are too few.
                order = np.concatenate([order, np.resize(order, missing)])
            self._epoch, self._order = epoch, order
        assert self._order is not None
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]

    def _ids_of_runs(self, runs: np.ndarray, epoch: int, index: int) -> np.ndarray:
        import numpy as np

        if epoch != self._epoch:
            order = self._sampler.order(len(runs) - 1, self._seed, epoch, None)
            self._epoch, self._order, self._ends = epoch, order, np.cumsum(np.diff(runs)[order])
        assert self._order is not None and self._ends is not None
        first = index * self._batch_size
        # tail=fill: the first rows again
        places = np.arange(first, first + self.size(index), dtype=np.int64) % self._rows
        number = np.searchsorted(self._ends, places, "right")
        return runs[self._order[number] + 1] - self._ends[number] + places


def micro_batch_bounds(rows: int, micro_batch_rows: int, join: bool = True) -> list[int]:
    """Bounds of the micro-batches of a global batch of `rows` rows: micro-batch k is rows [bounds[k], bounds[k + 1]).

    A smaller last batch has fewer micro-batches, not smaller ones. With `join`, a last micro-batch of a single row is
    joined to the one before it, because one value has no batch statistics; an evaluation takes none, and joins none.
    The rule does not depend on which rank computes what.
    """
    bounds = [*range(0, rows, micro_batch_rows), rows]
    if join and micro_batch_rows > 1 and len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
        del bounds[-2]
    return bounds


def share_within(shard: Shard, part: Shard) -> Shard:
    """A part of a shard, as a shard. All parts together compute each micro-batch of the shard once."""
    return Shard(shard.index * part.count + part.index, shard.count * part.count)


def micro_batches_of(micro_batches: int, shard: Shard) -> tuple[int, int]:
    """The micro-batches [first, last) that a shard computes. Numbers of micro-batches of shards differ by 1 at most."""
    return micro_batches * shard.index // shard.count, micro_batches * (shard.index + 1) // shard.count
