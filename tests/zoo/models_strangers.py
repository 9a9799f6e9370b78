"""Models as people publish them, each with a habit that few others have."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.zoo.entries import cross_entropy, images, squared_error, tokens, vectors, zoo_model
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


@zoo_model("padded_gru", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers")
class PaddedGru(nn.Module):
    """Lengths come from the padding; attention over all steps, packed and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.gru = nn.GRU(WIDTH, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.score, self.head = nn.Linear(12, 1), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])
        weight = self.score(h)[..., 0].masked_fill(x == 0, -1e4).softmax(1)
        return self.head((weight[..., None] * h).sum(1))


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


class Attention(nn.Module):
    """One layer of attention over words; subclasses add places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def placed(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.placed(self.embed(x))).chunk(3, -1)
        scores = torch.einsum("bid,bjd->bij", q, k) / math.sqrt(WIDTH)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return self.head(torch.einsum("bij,bjd->bid", scores.softmax(-1), v).mean(1))


def sinusoids(like: Tensor) -> Tensor:
    """A table of places (T, W) for (B, T, W)."""
    at = torch.arange(like.shape[1], device=like.device)[:, None] / 50 ** (
        torch.arange(0, WIDTH, 2, device=like.device) / WIDTH
    )
    return torch.stack([at.sin(), at.cos()], -1).flatten(1).to(like)


@zoo_model("places_in_attribute", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers", "cache")
class PlacesInAttribute(Attention):
    """The table of places is made in the first pass and kept in an attribute."""

    table: Tensor | None = None

    def placed(self, h: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < h.shape[1]:
            self.table = sinusoids(h)
        return h + self.table[: h.shape[1]]


@zoo_model(
    "places_registered_in_forward",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "strangers",
    "cache",
    may={"divided": "hidden state"},
)
class PlacesRegistered(Attention):
    """The same in a buffer that the first pass registers."""

    def placed(self, h: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", sinusoids(h), persistent=False)
        return h + self.table


zoo_model(
    "places_registered_declared",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "strangers",
    "cache",
    buffers={"table": "local"},
)(PlacesRegistered)


@zoo_model("cached_mask", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers", "cache")
class CachedMask(Attention):
    """functools keeps the table, for all models of this kind."""

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def table(length: int, dtype: torch.dtype) -> Tensor:
        return sinusoids(torch.empty(1, length, WIDTH, dtype=dtype))

    def placed(self, h: Tensor) -> Tensor:
        return h + self.table(h.shape[1], h.dtype)


@zoo_model("complex_places", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers", "buffers")
class ComplexPlaces(Attention):
    """Rotary places as complex numbers, in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LENGTH), 1 / 50 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def placed(self, h: Tensor) -> Tensor:
        pairs = torch.view_as_complex(h.reshape(*h.shape[:2], -1, 2))
        return torch.view_as_real(pairs * self.turns[: h.shape[1]]).flatten(2).to(h)


@zoo_model("lstm_weight_norm", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers", "parametrized")
class NormedLstm(nn.Module):
    """Weight norm over the recurrent weight of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(10, CLASSES)
        self.lstm = nn.utils.parametrizations.weight_norm(nn.LSTM(WIDTH, 10, batch_first=True), "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


@zoo_model("lstm_weight_drop", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers", "draws")
class WeightDrop(nn.Module):
    """Dropout of a recurrent weight, as AWD-LSTM has it, with the cell written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 40), nn.Linear(10, CLASSES)
        self.recurrent = nn.Parameter(torch.empty(40, 10).uniform_(-0.3, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        weight = F.dropout(self.recurrent, 0.3, self.training)
        h = c = x.new_zeros(len(x), 10, dtype=weight.dtype)
        for step in self.inner(self.embed(x)).unbind(1):
            i, f, g, o = (step + F.linear(h, weight)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


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


def _labelled(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    x, y = vectors()(rows, generator)
    return {"x": x, "labels": y}, y


@zoo_model("loss_inside", _labelled, lambda out, y: out["loss"], "strangers", "scalar", may={"*": "loss"})
class LossInside(nn.Module):
    """Computes its loss itself, as those of a well-known hub do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.last(torch.relu(self.first(batch["x"])))
        return {"loss": F.cross_entropy(logits, batch["labels"]), "logits": logits}


def _balanced(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = outputs
    return cross_entropy(logits, targets) + 0.01 * balance


@zoo_model(
    "router_with_capacity",
    vectors(),
    _balanced,
    "strangers",
    "rows coupled",
    "unused in a step",
    may={"fsdp": "uneven use"},
)
class Router(nn.Module):
    """Experts take at most so many rows of a micro-batch; a loss that balances them is for all rows together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.first, self.head = nn.Linear(12, 3, bias=False), nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        weight = self.gate(h).softmax(-1)
        best, chosen = weight.max(-1)
        out = h.clone()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:2, 0]
            if rows.numel():
                out[rows] = h[rows] + best[rows, None] * expert(h[rows])
        share = F.one_hot(chosen, 3).to(weight).mean(0)
        return self.head(out), 3 * (share * weight.mean(0)).sum()


@zoo_model("pondering", vectors(), cross_entropy, "strangers", "data-dependent", "calls", may={"fsdp": "uneven use"})
class Pondering(nn.Module):
    """One cell, called until the rows of the micro-batch say stop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 12), nn.GRUCell(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        h = torch.zeros_like(x)
        for _ in range(1 + int(x.detach().sum().abs() * 4) % 4):
            h = self.cell(x, h)
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


zoo_model("equilibrium", vectors(), cross_entropy, "strangers", "autograd", "calls", may={"fsdp": "layout"})(Solve)


@zoo_model("tied_autoencoder", autoencoded(vectors()), squared_error, "strangers", "tied")
class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight, transposed, outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(8, 5), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


@zoo_model("temperature", vectors(16), cross_entropy, "strangers", may={"divided": "hidden state"})
class Temperature(nn.Module):
    """Keeps a learned scale within bounds in each pass, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        self.classes = nn.Parameter(torch.randn(CLASSES, 6))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0, 4.6)
        a, b = x.chunk(2, 1)
        joined = F.normalize(self.left(a) * self.right(b), dim=-1)
        return self.scale.exp() * joined @ F.normalize(self.classes, dim=-1).t()


@zoo_model("fourier_mixing", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers")
class FourierMixing(nn.Module):
    """A transform in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.norm(h + torch.fft.fft2(h).real).mean(1))


@zoo_model("ensemble", vectors(), cross_entropy, "strangers")
class Ensemble(nn.Module):
    """Three nets in one call of vmap over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(0.3 * torch.randn(3, *s)) for s in ((12, 8), (CLASSES, 12))])

    def forward(self, x: Tensor) -> Tensor:
        def net(a: Tensor, b: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, a)), b)

        return torch.vmap(net)(*self.weights).mean(0)


@zoo_model("fixed_projection", vectors(), cross_entropy, "strangers")
class FixedProjection(nn.Module):
    """Draws the same projection in each pass, from a generator that it seeds there."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        projection = torch.randn(8, 12, generator=torch.Generator().manual_seed(7)).to(x)
        return self.last(torch.cos(x @ projection))


def _adaptive(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return -outputs[0]


@zoo_model("adaptive_softmax", _labelled, _adaptive, "strangers", "unused in a step", may={"fsdp": "uneven use"})
class AdaptiveSoftmax(nn.Module):
    """Rare classes have a cluster of their own, which is computed where rows fall into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.softmax = nn.Linear(8, 12), nn.AdaptiveLogSoftmaxWithLoss(12, CLASSES, [2], div_value=2.0)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = self.softmax(torch.relu(self.first(batch["x"])), batch["labels"])
        return out.output, out.loss


@zoo_model(
    "quantisation_aware",
    vectors(),
    cross_entropy,
    "strangers",
    "buffers",
    "changes in evaluation",
    "narrow",
    may={"divided": "hidden state"},
    precision="fp32",
)
class QuantisationAware(nn.Module):
    """Weights and activations rounded to eight bits as if; observers keep what they saw in buffers."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.watch = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.watch(torch.relu(self.first(x))))


zoo_model(
    "quantisation_aware_declared",
    vectors(),
    cross_entropy,
    "strangers",
    "buffers",
    "narrow",
    buffers={"watch.*": "mean"},
    precision="fp32",
)(QuantisationAware)


@zoo_model("narrow_inside", vectors(), cross_entropy, "strangers", "narrow", precision="fp32")
class NarrowInside(nn.Module):
    """Switches to bfloat16 for a part, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.middle(h)
        return self.last(torch.relu(h.to(x)))
