"""Losses that are means over rows, sums with counts, or neither, though they look alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import zoo_model

CLASSES = 4


def _found(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Nine places (B, 9, 5), and whether something is there, as numbers (B, 9)."""
    return torch.randn(rows, 9, 5, generator=generator), (torch.rand(rows, 9, generator=generator) < 0.2).float()


def _focal(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The focal loss of each row, and how much is there."""
    chance = outputs.sigmoid()
    right = chance * targets + (1 - chance) * (1 - targets)
    losses = (1 - right) ** 2 * F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return losses.sum(1), targets.sum(1)


def _focal_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    losses, counts = _focal(outputs, targets)
    return losses.sum() / counts.sum().clamp(min=1)


def _heavy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=outputs.new_tensor(3.0))


@zoo_model("focal_by_found", _found, _focal, "published")
@zoo_model("focal_by_found_scalar", _found, _focal_mean, "published", refused={"*": "loss"})
@zoo_model("binary_scalar", _found, _heavy, "published", "scalar")
class Detector(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten())


def _classes_in_bytes(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=generator)
    return x, x[:, :CLASSES].argmax(1).to(torch.int8)


def _shares(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=generator)
    return x, x[:, :CLASSES].softmax(1)


def _hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets.long(), reduction="none")
    return losses.topk(max(1, len(losses) // 2))[0].mean()


def _unexplained(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum() / ((targets - targets.mean(0)) ** 2).sum()


def _pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.maximum(0.9 * (targets - outputs), 0.1 * (outputs - targets)).mean()


@zoo_model("hard_examples", _classes_in_bytes, _hardest, "published", refused={"*": "loss"})
@zoo_model("bytes_scalar", _classes_in_bytes, lambda out, y: F.cross_entropy(out, y.long()), "published", "scalar")
@zoo_model("unexplained_variance", _shares, _unexplained, "published", refused={"*": "loss"})
@zoo_model("quantile_scalar", _shares, _pinball, "published", "scalar")
class OneLayer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, CLASSES))
