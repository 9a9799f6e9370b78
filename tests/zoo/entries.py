"""What an entry of the zoo is: a model and a loss as a stranger wrote them, and data. Knows nothing of dtf."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Data = Callable[[int, torch.Generator], tuple[Any, Tensor]]
Loss = Callable[[Any, Tensor], Any]
Build = TypeVar("Build", bound=Callable[[], nn.Module])

MODULES = (
    "vision",
    "timm",
    "sequence",
    "attention",
    "norm",
    "parametrized",
    "state",
    "buffers",
    "random",
    "structure",
    "outputs",
    "autograd",
    "loss",
    "declared",
    "words",
    "habits",
    "strangers",
    "published",
    "means",
    "counts",
    "functions",
    "reaches",
    *(["transformers"] if importlib.util.find_spec("transformers") else []),
)
"""The files `models_<name>.py`."""


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A model and its loss.

    `build` makes the plain module. `data` makes so many rows: inputs, a tensor or a dict of tensors, and targets.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Data
    loss: Loss
    tags: frozenset[str] = field(default_factory=frozenset)
    refused: dict[str, str] = field(default_factory=dict)
    """Must be refused: strategy -> the cause (see `causes.CAUSES`); "*": all, one process too; "divided": all that
    divide a global batch over replicas, and others may. No share of clean ones counts these.
    """
    may: dict[str, str] = field(default_factory=dict)
    """As `refused`, for what may be refused and may be trained."""
    buffers: dict[str, str] = field(default_factory=dict)
    """What its author declares of buffers that the forward pass changes: name or pattern -> mean, sum or local."""
    slow: bool = False
    precision: str = "fp64"
    """fp32 for a model that names this format itself, and for one too large for fp64."""

    @property
    def hidden_state(self) -> bool:
        """Whether its forward pass changes state that replicas cannot agree on, unless it is declared."""
        return "hidden state" in self.tags

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers, so that only dtf's own masks make it repeatable."""
        return "draws" in self.tags

    def must_refuse(self, strategy: str) -> str:
        """The cause for which a strategy has to refuse it; empty where it need not."""
        asked = [key for key in keys(strategy) if key != "divided" or strategy not in UNDIVIDED]
        return next((self.refused[key] for key in asked if key in self.refused), "")

    def rows(self, rows: int, seed: int) -> tuple[Any, Tensor]:
        """`rows` rows, the same each time."""
        return self.data(rows, torch.Generator().manual_seed(seed))


ALIKE = {
    "mesh zero=2": ("fsdp",),
    "mesh tensor=2": ("tensor",),
    "mesh pipeline=2 tensor=2": ("tensor", "pipeline"),
}
"""What an entry says of a strategy also holds of a mesh that does the same."""


UNDIVIDED = ("tensor", "pipeline", "mesh tensor=2", "mesh pipeline=2 tensor=2")
"""Strategies under which one replica of the model computes all rows."""


def keys(strategy: str) -> tuple[str, ...]:
    """Keys of `refused` and `may` that speak of a strategy, the nearest first."""
    return strategy, *ALIKE.get(strategy, ()), "divided", "*"


_found: dict[str, ZooModel] = {}


def zoo_model(
    name: str,
    data: Data,
    loss: Loss,
    *tags: str,
    refused: dict[str, str] | None = None,
    may: dict[str, str] | None = None,
    buffers: dict[str, str] | None = None,
    slow: bool = False,
    precision: str = "fp64",
) -> Callable[[Build], Build]:
    """A decorator: the class or function below makes the model of a new entry."""

    def keep(build: Build) -> Build:
        assert name not in _found, name
        _found[name] = ZooModel(
            name=name,
            build=build,
            data=data,
            loss=loss,
            tags=frozenset(tags),
            refused=refused or ({"divided": "hidden state"} if "hidden state" in tags else {}),
            may=may or {},
            buffers=buffers or {},
            slow=slow,
            precision=precision,
        )
        return build

    return keep


@cache
def load_zoo() -> dict[str, ZooModel]:
    """All entries by name."""
    for name in MODULES:
        importlib.import_module(f"tests.zoo.models_{name}")
    return dict(_found)


# ---------------------------------------------------------------- data


def vectors(width: int = 8, classes: int = 4) -> Data:
    """Rows (B, width) and a class."""

    def make(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, width, generator=generator)
        return x, (x[:, :classes] + 0.3 * torch.randn(rows, classes, generator=generator)).argmax(-1)

    return make


def regression(width: int = 8, out: int = 1) -> Data:
    """Rows (B, width) and `out` numbers in [0, 1]."""

    def make(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, width, generator=generator)
        return x, torch.sigmoid(x[:, :out] - x[:, -out:])

    return make


def images(size: int = 32, channels: int = 3, classes: int = 5) -> Data:
    """Images (B, channels, size, size) and a class."""

    def make(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, channels, size, size, generator=generator)
        return x, torch.randint(classes, (rows,), generator=generator)

    return make


def tokens(length: int = 7, vocabulary: int = 11, classes: int = 0) -> Data:
    """Token numbers (B, length), of which 0 is padding at the end, and a class, or the next token (B, length) with -100
    at padding.
    """

    def make(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(1, vocabulary, (rows, length + 1), generator=generator)
        ends = torch.randint(2, length + 1, (rows, 1), generator=generator)
        x = text[:, :-1].masked_fill(torch.arange(length) >= ends, 0)
        if classes:
            return x, torch.randint(classes, (rows,), generator=generator)
        return x, text[:, 1:].masked_fill(torch.arange(length) >= ends, -100)

    return make


# ---------------------------------------------------------------- losses


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean(dim=tuple(range(1, outputs.dim())))


def token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and counts of rows, of scores (B, T, V)."""
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return losses.sum(1), (targets != -100).sum(1)


def row_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens of each row."""
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return losses.sum(1) / (targets != -100).sum(1)
