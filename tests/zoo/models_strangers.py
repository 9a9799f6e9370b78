"""Models as people publish them, each with a habit that few others have."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.entries import cross_entropy, images, squared_error, vectors, zoo_model
from tests.zoo.models_state import autoencoded

WORDS, CLASSES, LENGTH, WIDTH = 11, 4, 7, 12


def _segments(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (B, 3, 16, 16) and a class for each pixel."""
    x = torch.randn(rows, 3, 16, 16, generator=generator)
    return x, x.argmax(1)


@zoo_model("unet", _segments, lambda out, y: F.cross_entropy(out, y), "strangers", "scalar")
class UNet(nn.Module):
    """Two levels with skips, batch norm and transposed convolutions; a mean over pixels."""

    def __init__(self) -> None:
        super().__init__()

        def twice(inputs: int, outputs: int) -> nn.Module:
            layers = [(inputs, outputs), (outputs, outputs)]
            return nn.Sequential(
                *(
                    part
                    for i, o in layers
                    for part in (nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
                )
            )

        self.down1, self.down2, self.bottom = twice(3, 6), twice(6, 8), twice(8, 12)
        self.up2, self.up1 = nn.ConvTranspose2d(12, 8, 2, stride=2), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.join2, self.join1, self.head = twice(16, 8), twice(12, 6), nn.Conv2d(6, 3, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        h = self.join2(torch.cat([self.up2(self.bottom(self.pool(b))), b], 1))
        return self.head(self.join1(torch.cat([self.up1(h), a], 1)))


def _elbo(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    seen, mean, log_variance = outputs
    kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return ((seen - targets) ** 2).sum(1) + 0.1 * kl


@zoo_model("vae", autoencoded(vectors()), _elbo, "strangers", "draws")
class Vae(nn.Module):
    """Draws by a distribution of torch; the decoder has batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample() if self.training else mean
        return self.decoder(z), mean, log_variance


@zoo_model("capsules", vectors(), cross_entropy, "strangers")
class Capsules(nn.Module):
    """Routing by agreement: three rounds, of which only the last has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(0.3 * torch.randn(4, CLASSES, 3, 2))

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        square = (s**2).sum(-1, keepdim=True)
        return square / (1 + square) * s / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        u = torch.einsum("bik,ijdk->bijd", x.view(len(x), 4, 2), self.votes)
        logits = torch.zeros_like(u[..., 0])
        for _ in range(2):
            v = self.squash((logits.softmax(2)[..., None] * u.detach()).sum(1))
            logits = logits + (u.detach() * v[:, None]).sum(-1)
        return self.squash((logits.softmax(2)[..., None] * u).sum(1)).norm(dim=-1) * 4


@zoo_model("drop_path", images(16), cross_entropy, "strangers", "draws")
class DropPath(nn.Module):
    """Residual branches left out row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            branch = block(h)
            if self.training:
                branch = branch * torch.floor(0.7 + torch.rand((len(h), 1, 1, 1), device=h.device)).to(h) / 0.7
            h = h + branch
        return self.head(h.mean((2, 3)))


def _pictures_with_questions(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    pictures, answers = images(12, classes=CLASSES)(rows, generator)
    return {"image": pictures, "question": torch.randint(WORDS, (rows, 3), generator=generator)}, answers


@zoo_model("film", _pictures_with_questions, cross_entropy, "strangers", "inputs")
class Film(nn.Module):
    """A question scales and shifts the channels of a picture, between batch norm without weights and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)
        self.words, self.film, self.head = nn.EmbeddingBag(WORDS, 6), nn.Linear(6, 16), nn.Linear(8, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        scale, shift = self.film(self.words(batch["question"]))[..., None, None].chunk(2, 1)
        return self.head(torch.relu((1 + scale) * self.bn(self.conv(batch["image"])) + shift).mean((2, 3)))


@zoo_model("bilinear", vectors(), cross_entropy, "strangers")
class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.join, self.last = nn.Bilinear(4, 4, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return self.last(torch.tanh(self.join(a.contiguous(), b.contiguous())))


@zoo_model("perceiver", images(12, classes=CLASSES), cross_entropy, "strangers")
class Perceiver(nn.Module):
    """Learned latents, expanded over rows, look at pixels twice through the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH).clamp(-2, 2) * 0.02)
        self.pixels, self.look = nn.Linear(3, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.pixels(x.flatten(2).transpose(1, 2))
        h = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            h = self.norm(h + self.look(h, pixels, pixels, need_weights=False)[0])
        return self.head(h.mean(1))


class Swish(torch.autograd.Function):
    """Keeps its input alone for backward, in a version of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, beta)
        ctx.kept = {"shape": x.shape}
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, beta = ctx.saved_tensors
        assert x.shape == ctx.kept["shape"]
        s = torch.sigmoid(beta * x)
        rest = s * (1 - s)
        return gradient * (s + beta * x * rest), (gradient * x * x * rest).sum() if ctx.needs_input_grad[1] else None


@zoo_model("own_swish", vectors(), cross_entropy, "strangers", "autograd")
class OwnSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.beta = nn.Linear(8, 12), nn.Linear(12, CLASSES), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Swish.apply(self.first(x), self.beta))


@zoo_model("reentrant_dropout", vectors(), cross_entropy, "strangers", "checkpoint", "draws")
class ReentrantDropout(nn.Module):
    """Blocks with dropout and batch norm, computed again in the old way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2)) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + (checkpoint(block, h, use_reentrant=True) if self.training else block(h))
        return self.last(h)


class Solve(nn.Module):
    """A fixed point without a graph, then one step with it, whose gradient a hook solves for in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.4 * self.inner(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(12):
                z = self.step(z, x)
        z = self.step(z, x)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            again = self.step(start, x.detach())

            def solve(gradient: Tensor) -> Tensor:
                g = gradient
                for _ in range(12):
                    g = gradient + torch.autograd.grad(again, start, g, retain_graph=True)[0]
                return g

            z.register_hook(solve)
        return self.last(z)


zoo_model("equilibrium", vectors(), cross_entropy, "strangers", "autograd", "calls")(Solve)


@zoo_model("tied_autoencoder", autoencoded(vectors()), squared_error, "strangers", "tied")
class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight, transposed, outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(8, 5), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)
