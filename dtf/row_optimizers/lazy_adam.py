"""Adam whose moments move only when their row is touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.row_optimizer import Scheduled

if TYPE_CHECKING:
    import numpy as np


@register("sparse", "lazy_adam")
class LazyAdam(Scheduled):
    """Adam on touched rows. Equals torch.optim.SparseAdam: moments rest while their row does, bias is corrected by the steps of the run, not of the row.

    Source: Kingma & Ba 2015 (arXiv:1412.6980).
    """

    averages_squares = True

    beta1: float = option(default=0.9, least=0, below=1, doc="decay of the running mean of gradients, each time that the row is touched")
    beta2: float = option(default=0.999, least=0, below=1, doc="decay of the running mean of squared gradients, each time that the row is touched")
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    weight_decay: float = option(
        default=0.0, least=0, doc="factor of the row that is added to its gradient (L2 penalty); approximate: only when the row is touched"
    )

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"mean": (width, 0.0), "square": (width, 0.0)}

    def step(self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int) -> None:
        from dtf.row_kernels import adam

        real = records.dtype.type
        rate = lr * math.sqrt(1 - self.beta2 ** (step + 1)) / (1 - self.beta1 ** (step + 1))
        take1, take2 = real(1 - self.beta1), real(1 - self.beta2)
        adam(records, positions, gradients, real(factor), real(rate), take1, take2, real(self.eps), real(self.weight_decay))
