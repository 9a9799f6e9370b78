"""Stochastic gradient descent on touched rows, with weight decay on all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.row_optimizer import Scheduled
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@register("sparse", "sgd")
class RowSgd(Scheduled):
    """p = p - lr * (g + weight_decay * p). Equals torch.optim.SGD without momentum on the whole table, rows that were not touched included."""

    weight_decay: float = option(default=0.0, least=0, doc="factor of the row that is added to its gradient (L2 penalty); exact: on all rows, touched or not")

    def shrinkage(self, lr: float) -> float:
        if not self.weight_decay:
            return 0.0
        if lr * self.weight_decay >= 1:
            raise ConfigError(f"sparse.weight_decay={self.weight_decay:g} times the learning rate {lr:g} must be less than 1")
        return math.log1p(-lr * self.weight_decay)

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {}

    def step(self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int) -> None:
        from dtf.row_kernels import sgd

        real = records.dtype.type
        sgd(records, positions, gradients, real(factor), real(lr))
