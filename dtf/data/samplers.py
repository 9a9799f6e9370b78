"""The samplers that dtf ships, and global batches cut from their orders into micro-batches and the ranks' shares.

Torch-free. All are pure functions of (seed, epoch, index): ranks and restarts change nothing.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.sampler import Sampler, Tail
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Shard

if TYPE_CHECKING:
    import numpy as np


@register("sampler", "shuffle")
class Shuffle(Sampler):
    """A new random permutation in each epoch."""

    tail: Tail = option(
        default=Tail.partial,
        doc="the last global batch of an epoch: `partial` is smaller, `fill` is completed by a random choice of other "
        "rows, `drop` leaves it out",
    )

    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        import numpy as np

        from dtf.core.seeding import seed_of

        return np.random.Generator(np.random.Philox(seed_of(seed, "shuffle", epoch))).permutation(rows)


@register("sampler", "sequential")
class Sequential(Sampler):
    """The order of the data set, the same in every epoch."""

    tail: Tail = option(
        default=Tail.partial,
        doc="the last global batch of an epoch: `partial` is smaller, `drop` leaves it out, `fill` repeats rows",
    )

    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        import numpy as np

        return np.arange(rows)


@register("sampler", "weighted")
class Weighted(Sampler):
    """As many rows as there are, drawn with replacement, each with a probability of its own."""

    tail: Tail = option(
        default=Tail.partial,
        doc="the last global batch of an epoch: `partial` is smaller, `fill` is completed, `drop` leaves it out",
    )
    weights: str = option(
        default="",
        doc="file with a number per row, one a line, in the order of the data set; empty: by class, see `balance`",
    )
    balance: float = option(
        default=1.0,
        least=0,
        most=1,
        doc="without `weights`: 1: all classes equally often, 0: all rows; a class of n rows is drawn n^(1 - balance) "
        "times as often",
    )

    once = False

    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        import numpy as np

        from dtf.core.seeding import seed_of

        if self.weights:
            weight = self._read(rows)
        elif groups is None:
            raise ConfigError(
                "sampler=weighted: the recipe's rows have no classes to balance; give a number per row: "
                "sampler.weights=FILE"
            )
        else:
            weight = np.bincount(groups).astype(np.float64)[groups] ** -self.balance
        ends = np.cumsum(weight)
        uniform = np.random.Generator(np.random.Philox(seed_of(seed, "weighted", epoch))).random(rows)
        return np.searchsorted(ends / ends[-1], uniform, side="right").astype(np.int64)

    def fingerprint(self) -> str:
        if not self.weights:
            return ""
        try:
            return f", weights {zlib.crc32(Path(self.weights).read_bytes()):08x}"
        except OSError as error:
            raise DataError(
                f"sampler.weights={self.weights} cannot be read: {error.strerror}; it must hold a number per row, one "
                "a line"
            ) from error

    def _read(self, rows: int) -> np.ndarray:
        import numpy as np

        try:
            weight = np.loadtxt(self.weights, np.float64, ndmin=1)
        except (OSError, ValueError) as error:
            raise DataError(
                f"sampler.weights={self.weights} cannot be read: {error}; it must hold a number per row, one a line"
            ) from error
        if weight.shape != (rows,) or not np.isfinite(weight).all() or (weight < 0).any() or not weight.any():
            raise DataError(
                f"sampler.weights={self.weights} must hold {rows} numbers, one per training row, none negative and "
                "some above 0"
            )
        return weight


@register("sampler", "repeated")
class Repeated(Sampler):
    """Each row several times in a batch, each time with another augmentation. An epoch is as long as ever and visits a
    part of the rows.

    Source: Hoffer et al. 2020 (arXiv:1901.09335); the order is that of Touvron et al. 2021 (arXiv:2012.12877).
    """

    tail: Tail = option(
        default=Tail.partial,
        doc="the last global batch of an epoch: `partial` is smaller, `fill` is completed, `drop` leaves it out",
    )
    times: int = option(default=3, least=2, most=64, doc="views of a row")

    once = False
    repeats = True

    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        import numpy as np

        from dtf.core.seeding import seed_of

        chosen = np.random.Generator(np.random.Philox(seed_of(seed, "repeated", epoch))).permutation(rows)[
            : -(-rows // self.times)
        ]
        return (chosen[:, None] + rows * np.arange(self.times)).reshape(-1)[:rows]


class Epochs:
    """The global batches of a split. The order of the current epoch is kept; asking for another epoch computes it
    again.

    `groups`: as in `Sampler.order`. `runs`: as in `Dataset.runs`. The sampler then orders runs, whose rows stay
    together, and no list of all rows is made. ConfigError for runs with a sampler that chooses single rows.
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
        if runs is not None and not sampler.once:
            raise ConfigError(
                f"sampler={type(sampler).__name__.lower()} chooses single rows, and these data are read in runs of "
                "rows (recipe.data.mode=queue); "
                "use sampler=shuffle, or recipe.data.mode=memory"
            )
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


def cut(rows: int, micro_batch_rows: int) -> list[int]:
    """Bounds of the micro-batches of a global batch of `rows` rows: micro-batch k is rows [bounds[k], bounds[k + 1]).

    A smaller last batch has fewer micro-batches, not smaller ones. A last micro-batch of a single row is joined to the
    one before it, because one value has no batch statistics. The rule does not depend on which rank computes what.
    """
    bounds = [*range(0, rows, micro_batch_rows), rows]
    if micro_batch_rows > 1 and len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
        del bounds[-2]
    return bounds


def within(shard: Shard, part: Shard) -> Shard:
    """A part of a shard, as a shard. All parts together compute each micro-batch of the shard once."""
    return Shard(shard.index * part.count + part.index, shard.count * part.count)


def share(micro_batches: int, shard: Shard) -> tuple[int, int]:
    """The micro-batches [first, last) that a shard computes. Numbers of micro-batches of shards differ by 1 at most."""
    return micro_batches * shard.index // shard.count, micro_batches * (shard.index + 1) // shard.count
