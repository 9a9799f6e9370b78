"""A recipe that also reports of how many rows its metrics are."""

from __future__ import annotations

import torch

from dtf.api.evaluator import Evaluator, Peers
from dtf.api.recipe import Recipe


def counting_rows(toy: Recipe) -> Recipe:
    """The recipe, changed in place to report also how many rows its metrics are of, and how many an evaluator gets.
    Means stay what they are where every row counts twice.
    """
    vars(toy)["summarise"] = lambda sums: type(toy).summarise(toy, sums) | {"rows": sums[0]}
    if type(toy).evaluator is Recipe.evaluator:
        vars(toy)["eval_outputs"] = lambda outputs, batch: batch.weight[:, None]
        vars(toy)["evaluator"] = lambda rows: _RowCount()
    return toy


class _RowCount(Evaluator):
    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        self._weights.append(rows)

    def values(self, peers: Peers) -> dict[str, float]:
        count = sum(float(weights.sum()) for weights in self._weights)
        return {"evaluated": peers.reduce(torch.tensor([count], dtype=torch.float64)).item()}
