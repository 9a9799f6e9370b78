"""The samplers that dtf ships. Torch-free; pure functions of (seed, epoch): ranks and restarts change nothing."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.sampler import RowTrait, Sampler, Tail
from dtf.core.errors import DataError

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

    @property
    def needs(self) -> set[RowTrait]:
        return super().needs | (set() if self.weights else {RowTrait.classes})

    def order(self, rows: int, seed: int, epoch: int, groups: np.ndarray | None) -> np.ndarray:
        import numpy as np

        from dtf.core.seeding import seed_of

        if self.weights:
            weight = self._read(rows)
        else:
            assert groups is not None, "Sampler.check_rows has refused it"
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
