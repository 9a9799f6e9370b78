"""FTRL-Proximal: per-coordinate learning rates, and weights that are exactly zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.registry import option, register
from dtf.api.row_optimizer import RowOptimizer

if TYPE_CHECKING:
    import numpy as np


@register("sparse", "ftrl")
class Ftrl(RowOptimizer):
    """Follow the regularised leader. A row that was not drawn at 0 starts where it was drawn.

    Rows are solved anew from sums that hold alpha, so it is constant: under a learning rate that falls to a tenth, rows would fall to a tenth.
    Source: McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1 (doi:10.1145/2487575.2488200).
    """

    bound = ("alpha",)

    alpha: float = option(default=0.1, above=0, most=1_000_000, doc="learning rate, the same at every step: the schedule's is not used")
    beta: float = option(default=1.0, above=0, doc="added to the root of the summed squared gradients; tames the first steps")
    l1: float = option(default=0.0, least=0, doc="strength of the L1 penalty, which makes weights 0")
    l2: float = option(default=0.0, least=0, doc="strength of the L2 penalty")

    def rate(self, lr: float) -> float:
        return self.alpha

    def states(self, width: int) -> dict[str, tuple[int, float]]:
        return {"z": (width, 0.0), "n": (width, 0.0)}

    def step(self, records: np.ndarray, positions: np.ndarray, gradients: np.ndarray, factor: float, lr: float, step: int) -> None:
        from dtf.row_kernels import ftrl

        real = records.dtype.type
        ftrl(records, positions, gradients, real(factor), real(lr), real(self.beta), real(self.l1), real(self.l2))
