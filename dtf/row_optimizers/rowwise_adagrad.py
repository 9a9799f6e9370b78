"""Adagrad with one sum for each row: a row of 16 numbers keeps 1 beside them, not 16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.row_optimizer import Scheduled

if TYPE_CHECKING:
    import numpy as np


@register("sparse", "rowwise_adagrad")
class RowwiseAdagrad(Scheduled):
    """Divide each row's step by the root of its summed mean squared gradients, as TorchRec's and FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Source: Gupta et al. 2014, "Training highly multiclass classifiers", section 3.4; Mudigere et al. 2022 (arXiv:2104.05158), section 4.1.4.
    """

    initial_accumulator: float = option(default=0.0, least=0, doc="first value of the sums; more than 0 tames the first steps of rare rows")
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    weight_decay: float = option(
        default=0.0, least=0, doc="factor of the row that is added to its gradient (L2 penalty); approximate: only when the row is touched"
    )

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"sum": (1, self.initial_accumulator)}

    def step(self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int) -> None:
        from dtf.row_kernels import rowwise_adagrad

        real = records.dtype.type
        rowwise_adagrad(records, positions, gradients, real(factor), real(lr), real(self.eps), real(self.weight_decay))
