"""The models of `tests.support.authored`."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn


class Embed(nn.Module):
    """Tokens of the input, with a class token, positions and a scale that are parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(1, 6)
        self.token = nn.Parameter(torch.zeros(1, 1, 6))
        self.positions = nn.Parameter(torch.empty(1, 9, 6))
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.xavier_uniform_(self.project.weight)
        self.gain = nn.Parameter(torch.tensor(random.uniform(0.5, 1.5)))
        self.noise: Tensor
        self.register_buffer("noise", torch.from_numpy(np.random.randn(6)).float())
        self.register_buffer("table", None)
        self.table = torch.arange(9.0).expand(1, 9)  # assigned later, and in overlapping memory

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x[:, :, None])
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return x * self.gain + 0.01 * self.noise + 0.01 * self.table[..., None]


class Attention(nn.Module):
    """torch's own attention, with a scale of each channel that starts small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.scale = nn.Parameter(torch.full((6,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.scale * self.inner(y, y, y, need_weights=False)[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.2)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.mlp, self.head = Embed(), Attention(), Mlp(), nn.Linear(6, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.attention(self.embed(x)))[:, 0])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.token = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.token))
