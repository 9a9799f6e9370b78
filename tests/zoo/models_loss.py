"""Losses as authors write them: per row, sums with counts, scalar means, and those that are no means at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import (
    cross_entropy,
    mean_cross_entropy,
    regression,
    squared_error,
    token_loss,
    tokens,
    vectors,
    zoo_model,
)

CLASSES, WORDS = 4, 11
NO_MEAN = {"*": "loss"}


class Net(nn.Module):
    """Two layers."""

    def __init__(self, out: int = CLASSES) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, out)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.first(x)))


class Tagger(nn.Module):
    """Scores of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.head = nn.Embedding(WORDS, 8), nn.Conv1d(8, 12, 3, padding=1), nn.Linear(12, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(self.embed(x).transpose(1, 2))).transpose(1, 2))


# ---------------------------------------------------------------- scalar means over rows

zoo_model("scalar_cross_entropy", vectors(), mean_cross_entropy, "loss", "scalar")(Net)
zoo_model("scalar_mse", regression(out=3), lambda out, y: F.mse_loss(out, y.to(out)), "loss", "scalar")(lambda: Net(3))
zoo_model("scalar_module_loss", vectors(), nn.CrossEntropyLoss(), "loss", "scalar")(Net)
zoo_model("label_smoothing", vectors(), lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), "loss", "scalar")(
    Net
)
zoo_model("huber", regression(), lambda out, y: F.huber_loss(out, y.to(out)), "loss", "scalar")(lambda: Net(1))
zoo_model("log_probabilities", vectors(), lambda out, y: F.nll_loss(F.log_softmax(out, 1), y), "loss", "scalar")(Net)


def multi_label(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, _ = vectors()(rows, generator)
    return x, (x[:, :CLASSES] > 0.3).float()


zoo_model(
    "multi_label",
    multi_label,
    lambda out, y: F.binary_cross_entropy_with_logits(out, y.to(out), pos_weight=torch.full((CLASSES,), 2.0).to(out)),
    "loss",
    "scalar",
)(Net)


@zoo_model("l2_penalty", vectors(), lambda out, y: F.cross_entropy(out["scores"], y) + out["penalty"], "loss", "scalar")
class Regularised(Net):
    """A mean over rows, and a penalty on parameters that has no rows."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "scores": super().forward(x),
            "penalty": 1e-2 * torch.stack([p.square().sum() for p in self.parameters()]).sum(),
        }


# ---------------------------------------------------------------- of each row

zoo_model("focal", vectors(), lambda out, y: _focal(out, y), "loss")(Net)
zoo_model("kl", vectors(), lambda out, y: _distillation(out, y), "loss")(Net)
zoo_model("mae_per_row", regression(out=2), lambda out, y: (out - y).abs().mean(1), "loss")(lambda: Net(2))
zoo_model("poisson", regression(), lambda out, y: F.poisson_nll_loss(out, y, reduction="none")[:, 0], "loss")(
    lambda: Net(1)
)


def _focal(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(outputs, targets)
    return (1 - (-loss).exp()) ** 2 * loss


def _distillation(outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = F.one_hot(targets, CLASSES).to(outputs) * 0.8 + 0.05
    return F.kl_div(outputs.log_softmax(1), wanted, reduction="none").sum(1)


def triplets(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Anchor, positive and negative."""
    anchor, y = vectors()(rows, generator)
    near = anchor + 0.1 * torch.randn(rows, 8, generator=generator)
    return {"anchor": anchor, "near": near, "far": torch.randn(rows, 8, generator=generator)}, y


def triplet_loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.triplet_margin_loss(*outputs, margin=0.5, reduction="none")


@zoo_model("triplet", triplets, triplet_loss, "loss", "calls")
class Triplet(nn.Module):
    """One encoder, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(x["anchor"]), self.encoder(x["near"]), self.encoder(x["far"])


def cosine_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cosine_embedding_loss(*outputs, (targets % 2) * 2 - 1, margin=0.2)


@zoo_model("cosine_embedding", triplets, cosine_loss, "loss", "scalar")
class Cosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net(6)

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.encoder(x["anchor"]), self.encoder(x["far"])


# ---------------------------------------------------------------- tokens

zoo_model("token_sums", tokens(), token_loss, "loss", "sums and counts")(Tagger)
zoo_model(
    "token_totals",
    tokens(),
    lambda out, y: tuple(part.sum() for part in token_loss(out, y)),
    "loss",
    "sums and counts",
)(Tagger)
zoo_model(
    "token_mean",
    tokens(),
    lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100),
    "loss",
    "scalar",
    "token mean",
)(Tagger)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])
zoo_model(
    "weighted_counts",
    vectors(),
    lambda out, y: (cross_entropy(out, y) * WEIGHTS.to(out)[y], WEIGHTS.to(out)[y]),
    "loss",
    "sums and counts",
)(Net)
zoo_model(
    "weighted_classes",
    vectors(),
    lambda out, y: F.cross_entropy(out, y, weight=WEIGHTS.to(out)),
    "loss",
    "scalar",
    refused=NO_MEAN,
)(Net)

# ---------------------------------------------------------------- rows coupled within a micro-batch


def contrastive_loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Of each row, in both directions; the others of the micro-batch are its negatives."""
    a, b, scale = outputs
    logits = scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    right = torch.arange(len(a), device=a.device)
    both = [F.cross_entropy(each, right, reduction="none") for each in (logits, logits.T)]
    return (both[0] + both[1]) / 2


@zoo_model("contrastive", triplets, contrastive_loss, "loss", "rows coupled")
class Clip(nn.Module):
    """Two encoders, and a learned temperature among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Net(6), Net(6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(x["anchor"]), self.text(x["near"]), self.scale


zoo_model(
    "contrastive_mean", triplets, lambda out, y: contrastive_loss(out, y).mean(), "loss", "scalar", refused=NO_MEAN
)(Clip)


def barlow(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Cross-correlation over the micro-batch: a scalar of batch statistics."""
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-6) for z in outputs[:2])
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).square().sum() + 0.01 * c.square().sum()


zoo_model("batch_statistics_loss", triplets, barlow, "loss", "scalar", refused=NO_MEAN)(Clip)
zoo_model(
    "variance_reduced",
    vectors(),
    lambda out, y: cross_entropy(out, y) + 0.1 * (out - out.mean(0)).square().mean(1),
    "loss",
    "rows coupled",
)(Net)

# ---------------------------------------------------------------- no means over rows

zoo_model(
    "scalar_sum", vectors(), lambda out, y: F.cross_entropy(out, y, reduction="sum"), "loss", "scalar", refused=NO_MEAN
)(Net)
zoo_model(
    "root_mean_square",
    regression(),
    lambda out, y: F.mse_loss(out, y.to(out)).sqrt(),
    "loss",
    "scalar",
    refused=NO_MEAN,
)(lambda: Net(1))
zoo_model(
    "sum_and_penalty",
    vectors(),
    lambda out, y: F.cross_entropy(out["scores"], y, reduction="sum") + out["penalty"],
    "loss",
    "scalar",
    refused=NO_MEAN,
)(Regularised)
zoo_model(
    "dice",
    multi_label,
    lambda out, y: 1 - 2 * (out.sigmoid() * y).sum() / (out.sigmoid().sum() + y.sum() + 1e-6),
    "loss",
    "scalar",
    refused=NO_MEAN,
)(Net)
zoo_model("wrong_shape", vectors(), lambda out, y: (out - 1).square(), "loss", refused=NO_MEAN)(Net)
zoo_model("no_tensor", vectors(), lambda out, y: float(out.sum()), "loss", "mistake", refused=NO_MEAN)(Net)
zoo_model("none_loss", vectors(), lambda out, y: None, "loss", "mistake", refused=NO_MEAN)(Net)
zoo_model("column_loss", regression(), lambda out, y: (out - y) ** 2, "loss", refused=NO_MEAN)(lambda: Net(1))

# ---------------------------------------------------------------- several losses

SEVERAL = {"*": "several updates"}


class Gan(nn.Module):
    """A generator and a discriminator, each with a loss and an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Net(8), Net(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.generator(torch.tanh(x.flip(1)))
        return self.discriminator(x), self.discriminator(fake.detach()), self.discriminator(fake)


def gan_losses(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of the generator and of the discriminator."""
    real, fake, fooled = outputs
    return F.softplus(-fooled).mean(), (F.softplus(-real) + F.softplus(fake)).mean()


zoo_model(
    "gan",
    vectors(),
    lambda out, y: dict(zip(("generator", "discriminator"), gan_losses(out, y), strict=True)),
    "loss",
    refused=SEVERAL,
)(Gan)
zoo_model("gan_pair", vectors(), gan_losses, "loss", refused=SEVERAL)(Gan)
zoo_model(
    "gan_rows", vectors(), lambda out, y: (F.softplus(-out[2])[:, 0], F.softplus(out[1])[:, 0]), "loss", refused=SEVERAL
)(Gan)
zoo_model("gan_reversed", vectors(), lambda out, y: (F.softplus(-out[0]) + F.softplus(out[1]))[:, 0], "loss")(
    lambda: ReversedGan()
)


class ReversedGan(Gan):
    """The pattern to use: one loss, and the gradient turned round between the two."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.generator(torch.tanh(x.flip(1)))
        turned = fake.detach() * 2 - fake  # its value is that of fake, its gradient the opposite
        score = self.discriminator(turned)
        return self.discriminator(x), score, score


zoo_model("reconstruction", vectors(), lambda out, y: squared_error(out, F.one_hot(y, CLASSES)), "loss")(Net)


def _by_processes(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divides by the number of processes, as a loss does that is then summed over them (DETR)."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses / (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)


zoo_model("loss_by_processes", vectors(), _by_processes, "loss", "mistake", may={"*": "layout"})(Net)
