"""Transformers: tied embeddings, causal masks, rotary tables, mixtures of experts."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, images, row_token_loss, token_loss, tokens, zoo_model

WORDS, CLASSES, LENGTH, WIDTH = 11, 4, 7, 12


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both after a norm."""

    def __init__(self, width: int = WIDTH, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.ln2(x))


@zoo_model("gpt_tied", tokens(LENGTH), token_loss, "attention", "tied", "sums and counts")
class TiedGpt(nn.Module):
    """The output layer is the embedding, used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.ln = nn.LayerNorm(WIDTH)
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(4))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.linear(self.ln(h), self.embed.weight)


@zoo_model("gpt_tied_modules", tokens(LENGTH), row_token_loss, "attention", "tied", "draws")
class TiedModules(nn.Module):
    """Two modules hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.pos = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.first, self.second = Block(dropout=0.1), Block(dropout=0.1)
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.trunc_normal_(self.pos, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.pos[:, : x.shape[1]]
        return self.head(self.ln(self.second(self.first(h))))


@zoo_model("encoder", tokens(LENGTH, classes=CLASSES), cross_entropy, "attention", "draws")
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding)[:, 0])


@zoo_model("encoder_decoder", tokens(LENGTH), token_loss, "attention", "sums and counts")
class EncoderDecoder(nn.Module):
    """nn.Transformer with masks, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return self.head(self.transformer(self.embed(x), self.embed(shifted), tgt_mask=mask, tgt_is_causal=True))


@zoo_model("multihead_attention", tokens(LENGTH, classes=CLASSES), cross_entropy, "attention")
class Pooling(nn.Module):
    """Attention of a learned query, with extra key and value biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.query = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True, kdim=WIDTH, vdim=WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.query)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.attention(self.query.expand(len(x), -1, -1), h, h)[0][:, 0])


@zoo_model(
    "rotary",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "attention",
    "cache",
    may={"divided": "hidden state"},
)
class Rotary(nn.Module):
    """A table of angles in non-persistent buffers, made anew when a longer text comes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qk, self.v = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        inv = 1.0 / 100 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
        self.register_buffer("inv_freq", inv, persistent=False)
        self.seen = 0
        self._table(2)

    def _table(self, length: int) -> None:
        self.seen = length
        angles = torch.outer(torch.arange(length, device=self.inv_freq.device).to(self.inv_freq), self.inv_freq)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _turn(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        a, b = x.chunk(2, -1)
        return x * self.cos[:t] + torch.cat([-b, a], -1) * self.sin[:t]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.seen:
            self._table(x.shape[1])
        h = self.embed(x)
        q, k = map(self._turn, self.qk(h).chunk(2, -1))
        return self.head(F.scaled_dot_product_attention(q, k, self.v(h)).mean(1))


class Experts(nn.Module):
    """Each row goes to its best expert; an expert without rows is not called."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)) for _ in range(count)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


@zoo_model(
    "mixture_of_experts",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "attention",
    "data-dependent",
    "unused in a step",
    may={"fsdp": "uneven use"},
)
class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.moe = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mean(1)
        return self.head(h + self.moe(h))


@zoo_model("soft_experts", tokens(LENGTH, classes=CLASSES), cross_entropy, "attention")
class SoftMixture(nn.Module):
    """All experts for all rows, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(3, 16, WIDTH) * 0.2)
        self.gate, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mean(1)
        y = torch.einsum("bw,ewh->beh", h, self.up).relu()
        y = torch.einsum("beh,ehw,be->bw", y, self.down, self.gate(h).softmax(-1))
        return self.head(h + y)


@zoo_model("class_token", images(16), cross_entropy, "attention")
class ClassToken(nn.Module):
    """A small image transformer: class token, positions from trunc_normal_, LayerScale, a head of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.empty(1, 17, WIDTH))
        self.block, self.scale = Block(), nn.Parameter(1e-2 * torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 5)
        nn.init.trunc_normal_(self.pos, std=0.02)
        nn.init.normal_(self.cls, std=1e-6)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.pos
        return self.head((h + self.scale * self.block(h))[:, 0])


class HeadsBySize(nn.Module):
    """Attention with a norm of each head and dropout of its weights. It knows how large a head is, not how many."""

    def __init__(self, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(self.size), nn.Dropout(dropout)

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def joined(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.by_head, self.qkv(x).chunk(3, -1))
        weights = (self.norm(q) @ self.norm(k).transpose(-2, -1) / math.sqrt(self.size)).softmax(-1)
        return self.out(self.joined(self.drop(weights) @ v))


class HeadsByCount(HeadsBySize):
    """It knows how many heads there are: of half of the channels it makes as many heads, each of half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class HeadsByCountAndWidth(HeadsByCount):
    """It has the number of heads and the width from its constructor."""

    def by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, WIDTH // self.heads).transpose(1, 2)


class OneLayer(nn.Module):
    """Attention between an embedding and a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(WORDS, WIDTH), attention, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head((h + self.attention(h)).mean(1))


zoo_model("heads_by_size", tokens(LENGTH, classes=CLASSES), cross_entropy, "attention", "draws")(
    lambda: OneLayer(HeadsBySize())
)
zoo_model(
    "heads_by_count",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "attention",
    "draws",
    "mistake",
    refused={"tensor": "layout"},
)(lambda: OneLayer(HeadsByCount()))
zoo_model(
    "heads_by_count_and_width",
    tokens(LENGTH, classes=CLASSES),
    cross_entropy,
    "attention",
    "draws",
    "mistake",
    refused={"tensor": "layout"},
)(lambda: OneLayer(HeadsByCountAndWidth()))


@zoo_model("grouped_queries", tokens(LENGTH), token_loss, "attention", "sums and counts")
class GroupedQueries(nn.Module):
    """Two heads of queries for each of keys and values, which come from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.kv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = (y.unflatten(-1, (-1, 3)).transpose(1, 2) for y in (self.q(h), *self.kv(h).chunk(2, -1)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(h + self.out(y.transpose(1, 2).flatten(2)))
