"""Adagrad on touched rows: a learning rate of its own for each element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.row_optimizer import Scheduled

if TYPE_CHECKING:
    import numpy as np


@register("sparse", "adagrad")
class RowAdagrad(Scheduled):
    """Divide each element's step by the root of its summed squared gradients. Equals torch.optim.Adagrad with sparse gradients.

    Source: Duchi, Hazan & Singer 2011 (jmlr.org/papers/v12/duchi11a.html).
    """

    initial_accumulator: float = option(default=0.0, least=0, doc="first value of the sums; more than 0 tames the first steps of rare rows")
    eps: float = option(default=1e-10, above=0, doc="added to the denominator")
    weight_decay: float = option(
        default=0.0, least=0, doc="factor of the row that is added to its gradient (L2 penalty); approximate: only when the row is touched"
    )

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"sum": (width, self.initial_accumulator)}

    def step(self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int) -> None:
        from dtf.row_kernels import adagrad

        real = records.dtype.type
        adagrad(records, positions, gradients, real(factor), real(lr), real(self.eps), real(self.weight_decay))
