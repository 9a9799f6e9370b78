"""The models of `tests.support.tied`. Numbers of a row become one of four words; the answer is a word."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

WORDS, WIDTH = 4, 8


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with what it gets added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        seen = torch.softmax((q @ k.mT + torch.full((8, 8), -30.0).triu(1).to(q)) * WIDTH**-0.5, -1)
        x = x + self.out(seen @ v)
        return x + self.drop(torch.tanh(self.mlp(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.full((WIDTH,), 0.25))  # used by the first and the last stage

    def begin(self, x: Tensor) -> Tensor:
        words = (x > 0).long() + 2 * (x.abs() > 0.7).long()
        return self.embed(words) + self.table * torch.arange(x.shape[1], device=x.device)[:, None]

    def end(self, h: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(h) + self.table, self.embed.weight)[:, -1]

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.third(self.second(self.first(self.begin(x)))))


class Modules(Transformer):
    """Two modules hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def end(self, h: Tensor) -> Tensor:
        return self.head(self.norm(h) + self.table)[:, -1]


class Again(Transformer):
    """A layer that is called again two blocks later, and a weight that three blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first.drop = self.second.drop = self.third.drop = nn.Tanh()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(self.begin(x)))
        h = self.third(nn.functional.linear(h, self.second.mlp.weight))
        return self.end(self.first(h) + nn.functional.linear(h, self.second.mlp.weight))


class Shifting(nn.LayerNorm):
    """A norm that changes a buffer of the whole model."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(WIDTH)
        self.table: Tensor
        self.register_buffer("table", table)

    def forward(self, input: Tensor) -> Tensor:
        self.table.add_(0.01)
        return super().forward(input)


class Changing(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Shifting(self.table)


def build(kind: str) -> nn.Module:
    return {"function": Transformer, "modules": Modules, "again": Again, "changing": Changing}[kind]()


class Memory(nn.Linear):
    """Keeps its last output."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.last = torch.zeros(8)

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input) + self.last.to(input)
        self.last = y.detach().mean(0)
        return y


class Draws(nn.Linear):
    """Is scaled by a number of Python's generator."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * random.uniform(0.5, 1.5)


class Remembers(nn.Module):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.first, self.memory, self.last = nn.Linear(8, 8), Draws() if draws else Memory(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.memory(torch.tanh(self.first(x)))))
