"""Models of click-through rates: inputs {"ids": (B, F)[, "dense": (B, D)]} to the logit of a click, (B,).

Where sparse tables hold the rows, inputs have these rows already, (B, F, W): `ids` all of them, or several inputs some
fields each. Nothing here knows of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtf.api.layout import Layout, Split
from dtf.recipes.ctr.layers import (
    CompressedInteraction,
    CrossLayer,
    DenseTable,
    FirstOrder,
    MatrixCrossLayer,
    PairwiseDots,
    PairwiseProducts,
    mlp,
)


class Inputs(NamedTuple):
    """Sizes of the inputs of a model, and of the table in it."""

    fields: int  # F
    numbers: int  # D
    size: int  # rows of the table; 0: it lies outside of the model
    names: Sequence[str] = ("ids",)  # inputs that have ids or rows; their fields follow each other


class Tower(NamedTuple):
    """Layers of a multilayer perceptron."""

    widths: Sequence[int]
    batch_norm: bool
    dropout: float

    def on(self, inputs: int) -> nn.Sequential:
        return mlp(inputs, self.widths, self.batch_norm, self.dropout)


class Model(nn.Module):
    """A model whose table has rows of `width` numbers."""

    def __init__(self, inputs: Inputs, width: int) -> None:
        super().__init__()
        self.table = DenseTable(inputs.size, width) if inputs.size else nn.Identity()
        self._numbers, self._names = inputs.numbers, tuple(inputs.names)

    def rows(self, inputs: dict[str, Tensor]) -> Tensor:
        """The rows of all fields, (B, F, W)."""
        parts = [inputs[name] for name in self._names]
        return self.table(parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    def dense(self, inputs: dict[str, Tensor]) -> Tensor | None:
        return inputs["dense"] if self._numbers else None

    def flat(self, rows: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """All numbers of a row of the log, (B, F W + D)."""
        return torch.cat([rows.flatten(1), inputs["dense"]], 1) if self._numbers else rows.flatten(1)


class LogisticRegression(Model):
    """Logistic regression: a weight for each id."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, 1)
        self.first = FirstOrder(inputs.numbers, bias=True)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.first(self.rows(inputs)[..., 0], self.dense(inputs))


class FactorizationMachine(Model):
    """Logistic regression, and the product of each pair of rows. Source: Rendle 2010, eq. 1."""

    def __init__(self, inputs: Inputs, dim: int) -> None:
        super().__init__(inputs, dim + 1)
        self.first = FirstOrder(inputs.numbers, bias=True)
        self.pairs = PairwiseProducts()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        rows = self.rows(inputs)
        return self.first(rows[..., -1], self.dense(inputs)) + self.pairs(rows[..., :-1]).sum(1)


class DNN(Model):
    """A multilayer perceptron on all rows. Source: Covington et al. 2016, section 4."""

    def __init__(self, inputs: Inputs, dim: int, deep: Tower) -> None:
        super().__init__(inputs, dim)
        self.deep = deep.on(inputs.fields * dim + inputs.numbers)
        self.head = nn.Linear(deep.widths[-1], 1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.head(self.deep(self.flat(self.rows(inputs), inputs)))[:, 0]


class WideDeep(Model):
    """The sum of a logistic regression and a multilayer perceptron. `pairs`: also of a factorization machine on the
    same rows.

    Sources: Cheng et al. 2016 (arXiv:1606.07792); Guo et al. 2017, eq. 1 (arXiv:1703.04247).
    """

    def __init__(self, inputs: Inputs, dim: int, deep: Tower, pairs: bool) -> None:
        super().__init__(inputs, dim + 1)
        self.first = FirstOrder(inputs.numbers, bias=False)
        self.pairs = PairwiseProducts() if pairs else None
        self.deep = deep.on(inputs.fields * dim + inputs.numbers)
        self.head = nn.Linear(deep.widths[-1], 1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        rows = self.rows(inputs)
        vectors = rows[..., :-1]
        shallow = self.first(rows[..., -1], self.dense(inputs))
        if self.pairs is not None:
            shallow = shallow + self.pairs(vectors).sum(1)
        return shallow + self.head(self.deep(self.flat(vectors, inputs)))[:, 0]


class DCN(Model):
    """Cross layers and a multilayer perceptron, side by side or, where `stacked`, one on the other.

    `rank`: that of the matrices of the cross layers, 0: full; None: they have vectors.

    Sources: Wang et al. 2017 (arXiv:1708.05123), side by side with vectors; Wang et al. 2021, figure 1
    (arXiv:2008.13535).
    """

    def __init__(self, inputs: Inputs, dim: int, deep: Tower, layers: int, rank: int | None, stacked: bool) -> None:
        super().__init__(inputs, dim)
        width = inputs.fields * dim + inputs.numbers
        self.cross = nn.ModuleList(
            CrossLayer(width) if rank is None else MatrixCrossLayer(width, rank) for _ in range(layers)
        )
        self.deep = deep.on(width)
        self.head = nn.Linear(deep.widths[-1] + (0 if stacked else width), 1)
        self.parallel = not stacked

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        first = self.flat(self.rows(inputs), inputs)
        x = first
        for cross in self.cross:
            x = cross(first, x)
        ends = torch.cat([x, self.deep(first)], 1) if self.parallel else self.deep(x)
        return self.head(ends)[:, 0]


class XDeepFM(Model):
    """The sum of a logistic regression, a compressed interaction network and a multilayer perceptron.

    Source: Lian et al. 2018 (arXiv:1803.05170).
    """

    def __init__(self, inputs: Inputs, dim: int, deep: Tower, maps: Sequence[int]) -> None:
        super().__init__(inputs, dim + 1)
        self.first = FirstOrder(inputs.numbers, bias=False)
        ends = zip((inputs.fields, *maps), maps, strict=False)
        self.cin = nn.ModuleList(CompressedInteraction(before, inputs.fields, after) for before, after in ends)
        self.pooled = nn.Linear(sum(maps), 1, bias=False)
        self.deep = deep.on(inputs.fields * dim + inputs.numbers)
        self.head = nn.Linear(deep.widths[-1], 1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        rows = self.rows(inputs)
        vectors = rows[..., :-1]
        shallow = self.first(rows[..., -1], self.dense(inputs))
        x, sums = vectors, []
        for compressed in self.cin:
            x = compressed(x, vectors)
            sums.append(x.sum(2))
        shallow = shallow + self.pooled(torch.cat(sums, 1))[:, 0]
        return shallow + self.head(self.deep(self.flat(vectors, inputs)))[:, 0]


class DLRM(Model):
    """The numbers as one more row, made by a multilayer perceptron; products of all pairs of rows, and that row, into
    another one.

    Source: Naumov et al. 2019 (arXiv:1906.00091).
    """

    def __init__(self, inputs: Inputs, dim: int, deep: Tower, bottom: Sequence[int]) -> None:
        super().__init__(inputs, dim)
        self.bottom = mlp(inputs.numbers, (*bottom, dim), deep.batch_norm, 0.0) if inputs.numbers else None
        self.dots = PairwiseDots()
        rows = inputs.fields + bool(inputs.numbers)
        self.deep = deep.on(rows * (rows - 1) // 2 + (dim if inputs.numbers else 0))
        self.head = nn.Linear(deep.widths[-1], 1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        rows = self.rows(inputs)
        if self.bottom is None:
            return self.head(self.deep(self.dots(rows)))[:, 0]
        numbers = self.bottom(inputs["dense"])
        dots = self.dots(torch.cat([numbers[:, None], rows], 1))
        return self.head(self.deep(torch.cat([numbers, dots], 1)))[:, 0]


@torch.no_grad()
def draw(model: nn.Module, scale: float) -> None:
    """Draw a model, in place: rows of tables and first-order weights of numbers from a normal distribution of this
    standard deviation, other weights as Glorot & Bengio 2010, eq. 12.
    """
    weighted = [module.numbers for module in model.modules() if isinstance(module, FirstOrder)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=scale)
            nn.init.zeros_(module.weight[0])
        elif isinstance(module, nn.Linear | nn.Conv1d):
            if module in weighted:  # inputs as large as these would make a first guess that is sure and wrong
                nn.init.normal_(module.weight, std=scale)
            else:
                nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def layout(model: nn.Module) -> Layout:
    """Blocks are the layers in order.

    Tensor parallelism divides the table by ids, towers by pairs of layers and the small matrices of cross layers.
    """
    blocks, splits = [], {}
    for name, child in model.named_children():
        parts = (
            [f"{name}.{key}" for key, _ in child.named_children()]
            if isinstance(child, nn.Sequential | nn.ModuleList)
            else [name]
        )
        blocks += [(part,) for part in parts if any(True for _ in model.get_submodule(part).parameters())]
        if isinstance(child, DenseTable):
            splits[f"{name}.rows"] = Split.row
        elif isinstance(child, nn.Sequential):
            splits |= _by_pairs(child, parts, name == "deep" and not (isinstance(model, DCN) and model.parallel))
        elif isinstance(child, nn.ModuleList):
            splits |= {
                f"{part}.{key}": split
                for part in parts
                for key, split in _SMALL.items()
                if hasattr(model.get_submodule(part), key)
            }
    return Layout(tuple(blocks), splits)


_SMALL = {"inner": Split.column, "outer": Split.row}


def _by_pairs(layers: nn.Sequential, names: Sequence[str], headed: bool) -> dict[str, Split]:
    """Every first layer of two by outputs, every second by inputs; a last one without a second goes with the head,
    where that takes nothing else.
    """
    splits: dict[str, Split] = {}
    for i, name in enumerate(names):
        if i % 2:
            splits[f"{name}.linear"] = Split.row
        elif i + 1 < len(names) or headed:
            splits[f"{name}.linear"] = Split.column
            splits |= {f"{name}.{part}": Split.local for part in ("norm", "dropout") if hasattr(layers[i], part)}
    if headed and len(names) % 2:
        splits["head"] = Split.row
    return splits
