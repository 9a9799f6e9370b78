"""Models and rows of noise, as both contestants train them; what they learn does not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.gpu.contest import Case
from dtf.api.recipe import Dataset, Recipe
from dtf.model.losses import cross_entropy, target_rank
from dtf.model.metrics import weighted_sums
from dtf.optim.optimizers import Adam, Sgd
from dtf.recipes.ctr.model import Inputs, Tower, WideDeep, draw

if TYPE_CHECKING:
    from dtf.core.types import Batch

CLASSES = 1000
FIELDS, NUMBERS = 26, 13


EPOCH = 1000
"""How often the rows in memory come by in an epoch: at the end of an epoch dtf polls its ranks."""


class Pixels(Dataset):
    """Bytes (N, side, side, 3) in memory, as a reader of image files would leave them, and labels."""

    prefetch, threads = 3, 3

    def __init__(self, rows: int, side: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.bytes = torch.randint(256, (rows, side, side, 3), generator=generator, dtype=torch.uint8)
        self.labels = torch.randint(CLASSES, (rows,), generator=generator)

    def __len__(self) -> int:
        return EPOCH * len(self.labels)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(ids % len(self.labels))
        return self.bytes[rows], self.labels[rows]


class Clicks(Dataset):
    """Ids by Zipf's law, numbers and clicks in memory."""

    prefetch, threads = 3, 2

    def __init__(self, rows: int, values: int) -> None:
        random = np.random.default_rng(0)
        ids = np.minimum(random.zipf(1.2, (rows, FIELDS)), values) - 1 + np.arange(FIELDS) * values
        self.ids = torch.from_numpy(ids.astype(np.int64))
        self.dense = torch.from_numpy(random.standard_normal((rows, NUMBERS), np.float32))
        self.clicks = torch.from_numpy((random.random(rows) < 0.25).astype(np.float32))

    def __len__(self) -> int:
        return EPOCH * len(self.clicks)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        rows = torch.from_numpy(ids % len(self.clicks))
        return {"ids": self.ids[rows], "dense": self.dense[rows]}, self.clicks[rows]


class Noise(Recipe):
    """What all cases have in common."""

    rows: Dataset

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def check(self) -> None:
        """Nothing can be wrong."""

    def open_data(self, split: str, seed: int) -> Dataset:
        return self.rows


class Images(Noise):
    def __init__(self, rows: Dataset, arch: str) -> None:
        self.rows, self.arch = rows, arch

    def build_model(self) -> nn.Module:
        from torchvision import models

        return getattr(models, self.arch)(num_classes=CLASSES)

    def receive(self, inputs: Tensor) -> Tensor:
        return inputs.permute(0, 3, 1, 2).float().mul_(1 / 64).sub_(2)

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "top1", "top5")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, 0.1)

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        rank = target_rank(outputs, batch.targets)
        return weighted_sums(batch.weight, loss, rank <= 1, rank <= 5)


class ClickThrough(Noise):
    def __init__(self, rows: Clicks, table_rows: int, dim: int, hidden: tuple[int, ...]) -> None:
        self.rows, self.table_rows, self.dim, self.hidden = rows, table_rows, dim, hidden

    def build_model(self) -> nn.Module:
        tower = Tower(self.hidden, batch_norm=False, dropout=0.0)
        model = WideDeep(Inputs(FIELDS, NUMBERS, self.table_rows), self.dim, tower, pairs=True)
        draw(model, 1e-4)
        return model

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "predicted", "observed")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, outputs.sigmoid(), batch.targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def resnet(rehearsed: bool, batch: int = 256, compiled: bool = False) -> Case:
    """ResNet-50 at 224 pixels in bf16, channels last."""
    batch, side, arch = (4, 32, "resnet18") if rehearsed else (batch, 224, "resnet50")
    recipe = Images(Pixels(4 * batch, side), arch)
    return Case(
        recipe,
        batch,
        Sgd(momentum=0.9, weight_decay=5e-5),
        lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=5e-5, fused=True),
        channels_last=True,
        compiled=compiled,
    )


def deepfm(rehearsed: bool) -> Case:
    """DeepFM, a dense table of a million rows, three layers of 400, fp32."""
    batch, values, hidden = (64, 50, (16, 16)) if rehearsed else (8192, 40_000, (400, 400, 400))
    recipe = ClickThrough(Clicks(16 * batch, values), FIELDS * values, 16, hidden)
    return Case(
        recipe,
        batch,
        Adam(),
        lambda parameters: torch.optim.Adam(parameters, 0.01, fused=True, capturable=parameters[0].is_cuda),
        bf16=False,
    )
