"""Of what a scalar loss is the mean, proved on rows that show neither all classes nor ignored labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, cross_entropy, l1_loss, mse_loss, nll_loss

from dtf.model.mean_proof import Mean, proved

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 4


def first_rows(rows: int, tokens: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and labels of which only class 1 occurs."""
    torch.manual_seed(0)
    shape = (rows, CLASSES, tokens) if tokens else (rows, CLASSES)
    return torch.randn(shape), torch.ones((rows, tokens) if tokens else (rows,), dtype=torch.int64)


LABELS: dict[str, Loss] = {
    "plain": cross_entropy,
    "smoothed": partial(cross_entropy, label_smoothing=0.1),
    "log probabilities": lambda outputs, targets: nll_loss(outputs.log_softmax(1), targets),
}
NEITHER: dict[str, Loss] = {
    "weighted classes": partial(cross_entropy, weight=torch.tensor([1.0, 1.0, 1.0, 10.0])),
    "weights that one cut balances": partial(cross_entropy, weight=torch.tensor([1.0, 9.0, 1.0, 1.0])),
    "ignored 0": partial(cross_entropy, ignore_index=0),
    "ignored -1": partial(cross_entropy, ignore_index=-1),
    "ignored 255": partial(cross_entropy, ignore_index=255),
    "sum": partial(cross_entropy, reduction="sum"),
    "nearly a mean": lambda outputs, targets: cross_entropy(outputs, targets) + 3e-5 * outputs.var(0).mean(),
}


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", LABELS)
def test_a_mean_over_labels(name: str, rows: int) -> None:
    assert proved(LABELS[name], *first_rows(rows)) is Mean.labels


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", NEITHER)
def test_a_mean_of_neither(name: str, rows: int, tokens: int) -> None:
    assert proved(NEITHER[name], *first_rows(rows, tokens)) is None


def test_a_mean_over_tokens() -> None:
    assert proved(cross_entropy, *first_rows(2, 3)) is Mean.labels


@pytest.mark.parametrize("loss", [mse_loss, l1_loss, binary_cross_entropy])
def test_a_mean_over_rows(loss: Loss) -> None:
    torch.manual_seed(0)
    assert proved(loss, torch.rand(2, 3), torch.rand(2, 3)) is Mean.rows


def test_outputs_with_names() -> None:
    outputs, targets = first_rows(2)
    assert proved(lambda named, rows: cross_entropy(named["scores"], rows), {"scores": outputs}, targets) is Mean.labels


def test_half_formats() -> None:
    outputs, targets = first_rows(2)
    assert proved(cross_entropy, outputs.bfloat16(), targets) is Mean.labels


MASKED: dict[str, Loss] = {
    "by zero": lambda outputs, targets: ((outputs - targets) ** 2)[targets != 0].mean(),
    "by sign": lambda outputs, targets: ((outputs - targets) ** 2)[targets >= 0].mean(),
    "by NaN": lambda outputs, targets: ((outputs - targets.nan_to_num()) ** 2)[~targets.isnan()].mean(),
    "by their sum": lambda outputs, targets: ((outputs - targets) ** 2).sum() / targets.sum(),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_mean_over_some_numbers_is_no_mean_over_rows(rows: int, name: str) -> None:
    """The first rows have all of them."""
    torch.manual_seed(0)
    assert proved(MASKED[name], torch.randn(rows, 3), 1 + torch.rand(rows, 1).expand(rows, 3)) is None


@pytest.mark.parametrize("name", ["weighted classes", "ignored 0", "ignored -1", "ignored 255"])
def test_the_number_of_classes_need_not_be_known(name: str) -> None:
    """Where outputs are in a dict."""
    logits, labels = first_rows(2)
    weighs = partial(cross_entropy, weight=torch.tensor([10.0, 1.0, 1.0, 1.0]))
    of_tensor = weighs if name == "weighted classes" else NEITHER[name]
    assert proved(lambda outputs, targets: of_tensor(outputs["logits"], targets), {"logits": logits}, labels) is None
