"""Inputs and outputs that are no single tensors: dicts, tuples, dataclasses; and outputs whose shapes vary."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass

from tests.zoo.entries import cross_entropy, regression, squared_error, vectors, zoo_model

CLASSES = 4


def two_targets(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows (B, 8), and (B, 2): a class and a number."""
    x, y = vectors()(rows, generator)
    return x, torch.stack([y.float(), x.sum(1)], 1)


def multi_task_loss(outputs: Any, targets: Tensor) -> Tensor:
    labels = F.cross_entropy(outputs["label"], targets[:, 0].long(), reduction="none")
    return labels + 0.1 * F.smooth_l1_loss(outputs["number"][:, 0], targets[:, 1].to(labels), reduction="none")


@zoo_model("multi_task", two_targets, multi_task_loss, "outputs")
class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.heads = nn.ModuleDict({"label": nn.Linear(12, CLASSES), "number": nn.Linear(12, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.body(x))
        return {name: head(h) for name, head in self.heads.items()}


@zoo_model("multi_task_weighted", two_targets, lambda out, y: _weighted(out, y), "outputs")
class Uncertain(MultiTask):
    """Tasks are weighted by learned uncertainties, which are among the outputs (no axis of rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_sigma = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return OrderedDict(super().forward(x), log_sigma=self.log_sigma)


def _weighted(outputs: Any, targets: Tensor) -> Tensor:
    s = outputs["log_sigma"]
    first = F.cross_entropy(outputs["label"], targets[:, 0].long(), reduction="none")
    second = (outputs["number"][:, 0] - targets[:, 1].to(first)) ** 2
    return first * (-s[0]).exp() + second * (-s[1]).exp() + s.sum()


def deep_loss(outputs: Any, targets: Tensor) -> Tensor:
    main, (early, *_) = outputs
    return cross_entropy(main, targets) + 0.4 * cross_entropy(early, targets)


@zoo_model("tuple_outputs", vectors(), deep_loss, "outputs")
class DeepSupervision(nn.Module):
    """Nested tuples, with None in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, None]]:
        h = torch.relu(self.first(x))
        return self.last(h), (self.early(h), None)


@dataclass
class Output:
    scores: Tensor
    features: Tensor


@zoo_model("dataclass_outputs", vectors(), lambda out, y: cross_entropy(out.scores, y), "outputs")
class DataclassModel(nn.Module):
    """A plain dataclass, which torch's pytree does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Output:
        h = torch.relu(self.first(x))
        return Output(self.last(h), h)


@dataclass
class KnownOutput:
    scores: Tensor
    penalty: Tensor


register_dataclass(KnownOutput)


@zoo_model("registered_dataclass", vectors(), lambda out, y: cross_entropy(out.scores, y) + out.penalty, "outputs")
class KnownDataclass(nn.Module):
    """A dataclass that pytree knows; one of its fields has no axis of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> KnownOutput:
        h = torch.relu(self.first(x))
        return KnownOutput(self.last(h), 1e-3 * self.last.weight.abs().sum())


class Named(NamedTuple):
    scores: Tensor
    hidden: Tensor


@zoo_model("named_tuple", vectors(), lambda out, y: cross_entropy(out.scores, y), "outputs")
class NamedTupleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Named:
        h = torch.relu(self.first(x))
        return Named(self.last(h), h)


class Custom(dict):
    """A dict whose items are attributes too, as model libraries return them."""

    __getattr__ = dict.__getitem__


@zoo_model("model_output", vectors(), lambda out, y: cross_entropy(out.logits, y), "outputs")
class CustomDictModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Custom:
        return Custom(logits=self.last(torch.relu(self.first(x))))


def dict_rows(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Numbers, categories and a mask."""
    numbers, y = vectors(5)(rows, generator)
    return {
        "numbers": numbers,
        "categories": torch.randint(6, (rows, 3), generator=generator),
        "mask": torch.rand(rows, 5, generator=generator) > 0.2,
    }, y


@zoo_model("dict_inputs", dict_rows, cross_entropy, "inputs")
class DictInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(5 + 12, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        numbers = batch["numbers"] * batch["mask"]
        return self.head(torch.cat([numbers, self.embed(batch["categories"]).flatten(1)], 1))


@zoo_model("flag_argument", dict_rows, cross_entropy, "inputs")
class Optional(nn.Module):
    """Arguments with defaults, which nobody passes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0, *, skip: bool = False) -> Tensor:
        return batch["numbers"][:, :CLASSES] if skip else self.head(batch["numbers"]) * scale


@zoo_model("selected_rows", regression(), squared_error, "variable shapes")
class Selected(nn.Module):
    """Only rows of a certain kind go through the middle: its input may have no rows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = x[:, 0] > 0.8
        return self.last(h.masked_scatter(chosen[:, None], torch.relu(self.middle(h[chosen])))).expand(-1, 1)


@zoo_model("own_graph", vectors(), cross_entropy, "variable shapes", "rows coupled")
class Graph(nn.Module):
    """Message passing between the rows of a micro-batch that are near each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        near = (torch.cdist(x, x) < 3.5).to(x)
        h = torch.relu(self.first(x))
        return self.last(torch.cat([h, near @ h / near.sum(1, keepdim=True)], 1))
