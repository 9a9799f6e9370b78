"""Row optimizers of sparse tables: without torch, numpy and numba until they step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.row_optimizer import RowOptimizer, Scheduled
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@register("sparse", "sgd")
class RowSgd(Scheduled):
    """p = p - lr * (g + weight_decay * p).

    Equals torch.optim.SGD without momentum on the whole table, rows that were not touched included.
    """

    weight_decay: float = option(
        default=0.0,
        least=0,
        doc="factor of the row that is added to its gradient (L2 penalty); exact: on all rows, touched or not",
    )

    def shrinkage(self, lr: float) -> float:
        if not self.weight_decay:
            return 0.0
        if lr * self.weight_decay >= 1:
            raise ConfigError(
                f"sparse.weight_decay={self.weight_decay:g} times the learning rate {lr:g} must be less than 1"
            )
        return math.log1p(-lr * self.weight_decay)

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {}

    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        from dtf.sparse.row_kernels import sgd

        real = records.dtype.type
        sgd(records, positions, gradients, real(factor), real(lr))


@register("sparse", "adagrad")
class RowAdagrad(Scheduled):
    """Divide each element's step by the root of its summed squared gradients. Equals torch.optim.Adagrad with sparse
    gradients.

    Source: Duchi, Hazan & Singer 2011 (jmlr.org/papers/v12/duchi11a.html).
    """

    initial_accumulator: float = option(
        default=0.0, least=0, doc="first value of the sums; more than 0 tames the first steps of rare rows"
    )
    eps: float = option(default=1e-10, above=0, doc="added to the denominator")
    weight_decay: float = option(
        default=0.0,
        least=0,
        doc="factor of the row that is added to its gradient (L2 penalty); approximate: only when the row is touched",
    )

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"sum": (width, self.initial_accumulator)}

    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        from dtf.sparse.row_kernels import adagrad

        real = records.dtype.type
        adagrad(records, positions, gradients, real(factor), real(lr), real(self.eps), real(self.weight_decay))


@register("sparse", "rowwise_adagrad")
class RowwiseAdagrad(Scheduled):
    """Divide each row's step by the root of its summed mean squared gradients, as TorchRec's and FBGEMM's
    EXACT_ROWWISE_ADAGRAD.

    Source: Gupta et al. 2014, "Training highly multiclass classifiers", section 3.4; Mudigere et al. 2022
    (arXiv:2104.05158), section 4.1.4.
    """

    initial_accumulator: float = option(
        default=0.0, least=0, doc="first value of the sums; more than 0 tames the first steps of rare rows"
    )
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    weight_decay: float = option(
        default=0.0,
        least=0,
        doc="factor of the row that is added to its gradient (L2 penalty); approximate: only when the row is touched",
    )

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"sum": (1, self.initial_accumulator)}

    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        from dtf.sparse.row_kernels import rowwise_adagrad

        real = records.dtype.type
        rowwise_adagrad(records, positions, gradients, real(factor), real(lr), real(self.eps), real(self.weight_decay))


@register("sparse", "lazy_adam")
class LazyAdam(Scheduled):
    """Adam on touched rows. Equals torch.optim.SparseAdam: moments rest while their row does, bias is corrected by the
    steps of the run, not of the row.

    Source: Kingma & Ba 2015 (arXiv:1412.6980).
    """

    averages_squares = True

    beta1: float = option(
        default=0.9, least=0, below=1, doc="decay of the running mean of gradients, each time that the row is touched"
    )
    beta2: float = option(
        default=0.999,
        least=0,
        below=1,
        doc="decay of the running mean of squared gradients, each time that the row is touched",
    )
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    weight_decay: float = option(
        default=0.0,
        least=0,
        doc="factor of the row that is added to its gradient (L2 penalty); approximate: only when the row is touched",
    )

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"mean": (width, 0.0), "square": (width, 0.0)}

    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        from dtf.sparse.row_kernels import adam

        real = records.dtype.type
        rate = lr * math.sqrt(1 - self.beta2 ** (step + 1)) / (1 - self.beta1 ** (step + 1))
        take1, take2 = real(1 - self.beta1), real(1 - self.beta2)
        adam(
            records,
            positions,
            gradients,
            real(factor),
            real(rate),
            take1,
            take2,
            real(self.eps),
            real(self.weight_decay),
        )


@register("sparse", "ftrl")
class Ftrl(RowOptimizer):
    """Follow the regularised leader. A row that was not drawn at 0 starts where it was drawn.

    Rows are solved anew from sums that hold alpha, so it is constant: under a learning rate that falls to a tenth, rows
    would fall to a tenth. Source: McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1
    (doi:10.1145/2487575.2488200).
    """

    bound = ("alpha",)

    alpha: float = option(
        default=0.1, above=0, most=1_000_000, doc="learning rate, the same at every step: the schedule's is not used"
    )
    beta: float = option(
        default=1.0, above=0, doc="added to the root of the summed squared gradients; tames the first steps"
    )
    l1: float = option(default=0.0, least=0, doc="strength of the L1 penalty, which makes weights 0")
    l2: float = option(default=0.0, least=0, doc="strength of the L2 penalty")

    def rate(self, lr: float) -> float:
        return self.alpha

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"z": (width, 0.0), "n": (width, 0.0)}

    def step(
        self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int
    ) -> None:
        from dtf.sparse.row_kernels import ftrl

        real = records.dtype.type
        ftrl(records, positions, gradients, real(factor), real(lr), real(self.beta), real(self.l1), real(self.l2))
