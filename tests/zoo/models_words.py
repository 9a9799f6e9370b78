"""Models of words as people publish them: padding, tables of places, recurrent weights."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.entries import cross_entropy, tokens, zoo_model

WORDS, CLASSES, LENGTH, WIDTH = 11, 4, 7, 12


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


@zoo_model("fourier_mixing", tokens(LENGTH, classes=CLASSES), cross_entropy, "strangers")
class FourierMixing(nn.Module):
    """A transform in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.norm(h + torch.fft.fft2(h).real).mean(1))
