"""Layers of click-through models. Most take rows (B, F, W): W numbers for each of F fields.

Knows no data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DenseTable(nn.Module):
    """A table as a parameter: rows (B, F, W) of ids (B, F).

    Id -1 stands for zeros: the first row, which does not learn.
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(size + 1, width, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids + 1)


class FirstOrder(nn.Module):
    """The first-order term (B,): the weights of the rows, already looked up, and a weighted sum of the numbers.

    `bias`: whether to add a bias, where no other layer of the model has one.
    """

    def __init__(self, numbers: int, bias: bool) -> None:
        super().__init__()
        self.numbers = nn.Linear(numbers, 1, bias=bias) if numbers else None
        self.bias = nn.Parameter(torch.zeros(1)) if bias and not numbers else None

    def forward(self, weights: Tensor, dense: Tensor | None) -> Tensor:
        total = weights.sum(1)
        if self.numbers is not None:
            total = total + self.numbers(dense)[:, 0]
        return total if self.bias is None else total + self.bias


class PairwiseProducts(nn.Module):
    """Sum over all pairs of rows of their products, (B, W): half of (square of the sum - sum of the squares).

    Source: Rendle 2010, lemma 3.1.
    """

    def forward(self, rows: Tensor) -> Tensor:
        return 0.5 * (rows.sum(1).square() - rows.square().sum(1))


def layer(inputs: int, outputs: int, batch_norm: bool, dropout: float) -> nn.Sequential:
    """One layer of a multilayer perceptron. It has no bias before a normalisation."""
    parts = nn.Sequential()
    parts.add_module("linear", nn.Linear(inputs, outputs, bias=not batch_norm))
    if batch_norm:
        parts.add_module("norm", nn.BatchNorm1d(outputs))
    parts.add_module("relu", nn.ReLU())
    if dropout:
        parts.add_module("dropout", nn.Dropout(dropout))
    return parts


def mlp(inputs: int, widths: Sequence[int], batch_norm: bool, dropout: float) -> nn.Sequential:
    """A multilayer perceptron, (B, inputs) -> (B, last width)."""
    return nn.Sequential(*(layer(*ends, batch_norm, dropout) for ends in zip((inputs, *widths), widths, strict=False)))


class CrossLayer(nn.Module):
    """x0 * (x . w) + b + x. Source: Wang et al. 2017, eq. 3 (arXiv:1708.05123)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.weight(x) + self.bias + x


class MatrixCrossLayer(nn.Module):
    """x0 * (W x + b) + x. Where `rank` is not 0, W is a product U V of that rank.

    Source: Wang et al. 2021, equations 1 and 2 (arXiv:2008.13535).
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        if rank:
            self.inner = nn.Linear(width, rank, bias=False)
            self.outer = nn.Linear(rank, width)
        else:
            self.matrix = nn.Linear(width, width)
        self._rank = rank

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * (self.outer(self.inner(x)) if self._rank else self.matrix(x)) + x


class CompressedInteraction(nn.Module):
    """A layer of a compressed interaction network: products of `inputs` feature maps with the rows, element by element,
    mixed into `maps` feature maps. (B, inputs, D), (B, F, D) -> (B, maps, D).

    Source: Lian et al. 2018, eq. 6 (arXiv:1803.05170).
    """

    def __init__(self, inputs: int, fields: int, maps: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(inputs * fields, maps, 1)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.mix((x[:, :, None] * rows[:, None]).flatten(1, 2))


class PairwiseDots(nn.Module):
    """The dot product of each row with each row before it, (B, F (F - 1) / 2).

    Source: Naumov et al. 2019, section 2.1.3 (arXiv:1906.00091).
    """

    def forward(self, rows: Tensor) -> Tensor:
        count = rows.shape[1]
        below = torch.tril_indices(count, count, -1, device=rows.device)
        return torch.bmm(rows, rows.mT)[:, below[0], below[1]]
