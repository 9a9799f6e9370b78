"""Models that draw random numbers while they train: with generators that torch seeds, and with others."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, images, squared_error, vectors, zoo_model

CLASSES = 4
UNSEEN = {"divided": "unseen randomness"}


class Net(nn.Module):
    """Two layers; subclasses draw between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.prepare()

    def prepare(self) -> None:
        pass

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.relu(self.first(x))))


zoo_model("dropout_layers", vectors(), cross_entropy, "draws")(
    lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, CLASSES))
)
zoo_model("dropout_unnamed", vectors(), cross_entropy, "draws", "mistake", refused={"tensor": "layout"})(
    # its layout splits the layers before and behind the dropout, and leaves out the dropout
    lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 8), nn.Linear(8, CLASSES))
)
zoo_model("dropout2d", images(), cross_entropy, "draws")(
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Dropout2d(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
)
zoo_model("alpha_dropout", vectors(), cross_entropy, "draws")(
    lambda: nn.Sequential(nn.Linear(8, 12), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(12, CLASSES))
)
zoo_model("rrelu", vectors(), cross_entropy, "draws")(
    lambda: nn.Sequential(nn.Linear(8, 12), nn.RReLU(), nn.Linear(12, CLASSES))
)


@zoo_model("dropout_twice", vectors(), cross_entropy, "draws", "calls")
class Twice(Net):
    """One dropout module, used at two places."""

    def prepare(self) -> None:
        self.middle = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.4)

    def between(self, h: Tensor) -> Tensor:
        return self.drop(torch.relu(self.middle(self.drop(h))))


@zoo_model("own_dropout", vectors(), cross_entropy, "draws")
class OwnDropout(Net):
    """A class of dropout derived from torch's, with a forward of its own."""

    def prepare(self) -> None:
        class Noisy(nn.Dropout):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input) + (0.1 * torch.randn_like(input) if self.training else 0.0)

        self.drop = Noisy(0.3)

    def between(self, h: Tensor) -> Tensor:
        return self.drop(h)


@zoo_model("functional_dropout", vectors(), cross_entropy, "draws")
class Functional(Net):
    def prepare(self) -> None:
        self.middle = nn.Linear(12, 12)

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(torch.relu(self.middle(F.dropout(h, 0.2, self.training))), 0.2, self.training)


@zoo_model("noise", vectors(), cross_entropy, "draws")
class Noise(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.rand(h.shape, device=h.device) if self.training else h


@zoo_model("noise_in_evaluation", vectors(), cross_entropy, "draws", "draws in evaluation")
class AlwaysNoisy(Net):
    """Monte-Carlo dropout: evaluation draws too."""

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.2, training=True)


@zoo_model("gumbel", vectors(), cross_entropy, "draws")
class Gumbel(Net):
    def prepare(self) -> None:
        self.middle = nn.Linear(12, 12)

    def between(self, h: Tensor) -> Tensor:
        return F.gumbel_softmax(self.middle(h), tau=0.7, hard=False) if self.training else self.middle(h).softmax(-1)


def _elbo(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    decoded, mean, log_variance = outputs
    kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return squared_error(decoded, F.one_hot(targets, CLASSES).to(decoded)) + 0.1 * kl


@zoo_model("variational", vectors(), _elbo, "draws", "outputs")
class Variational(nn.Module):
    """A variational autoencoder: reparametrised noise, tuple outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return self.decode(z), mean, log_variance


@zoo_model("stochastic_depth", vectors(), cross_entropy, "draws")
class Depth(Net):
    """Rows skip a block at random."""

    def prepare(self) -> None:
        self.middle = nn.Linear(12, 12)

    def between(self, h: Tensor) -> Tensor:
        keep = torch.bernoulli(torch.full((len(h), 1), 0.7, device=h.device)).to(h) if self.training else 0.7
        return h + keep * torch.relu(self.middle(h))


@zoo_model("layer_drop", vectors(), cross_entropy, "draws", "data-dependent", "calls", may={"divided": "uneven use"})
class LayerDrop(Net):
    """Whole blocks, with batch norm, are left out at random (torch's generator)."""

    def prepare(self) -> None:
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()) for _ in range(3)])

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.4:
                h = h + block(h)
        return h


@zoo_model("layer_drop_python", vectors(), cross_entropy, "draws", "data-dependent", may={"fsdp": "uneven use"})
class PythonDrop(Net):
    """The same with Python's generator."""

    def prepare(self) -> None:
        self.middle = nn.Linear(12, 12)

    def between(self, h: Tensor) -> Tensor:
        return h + torch.relu(self.middle(h)) if not self.training or random.random() > 0.5 else h


@zoo_model("noise_numpy", vectors(), cross_entropy, "draws")
class NumpyNoise(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.from_numpy(0.1 * np.random.randn(*h.shape)).to(h) if self.training else h


@zoo_model("noise_private_generator", vectors(), cross_entropy, "draws", refused=UNSEEN)
class PrivateNoise(Net):
    """A generator of its own, in an attribute."""

    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn(h.shape, generator=self.generator).to(h) if self.training else h


@zoo_model("noise_private_numpy", vectors(), cross_entropy, "draws", refused=UNSEEN)
class PrivateNumpyNoise(Net):
    """numpy's new generators hide in an attribute too."""

    def prepare(self) -> None:
        self.rng = np.random.default_rng(5)

    def between(self, h: Tensor) -> Tensor:
        return h + torch.from_numpy(0.1 * self.rng.normal(size=h.shape)).to(h) if self.training else h


@zoo_model("mixup_inside", vectors(), cross_entropy, "draws", "rows coupled")
class Manifold(Net):
    """Rows are mixed with others of the micro-batch, in a drawn order."""

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        share = torch.distributions.Beta(0.4, 0.4).sample().to(h)
        return share * h + (1 - share) * h[torch.randperm(len(h), device=h.device)]


@zoo_model("bayesian", vectors(), cross_entropy, "draws")
class Bayesian(nn.Module):
    """Weights are drawn at each pass, one draw for all its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = (
            nn.Parameter(0.3 * torch.randn(CLASSES, 8)),
            nn.Parameter(torch.full((CLASSES, 8), -3.0)),
        )

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(self.mean) if self.training else 0.0
        return F.linear(x, self.mean + F.softplus(self.spread) * noise)
