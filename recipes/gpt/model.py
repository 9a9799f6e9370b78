"""A language model over bytes: GPT-2's network (Radford et al. 2019), with layers of its own for query, key and value.
GPT-2's bias of the keys is left out: outputs do not depend on it, so that its gradient is nothing but rounding.

B: rows; T: bytes of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
"""What a byte can be: the rows of the embedding, and the outputs."""


class GPT(nn.Module):
    """Bytes (B, T) int64 to scores (B, T, 256) of the byte after each; T is at most `length`."""

    def __init__(
        self, *, layers: int, heads: int, width: int, mlp_ratio: float, dropout: float, length: int, tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, round(mlp_ratio * width), dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self._draw(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def _draw(self, layers: int) -> None:
        """Draw all matrices as GPT-2 does: those that end a residual branch smaller, as there are 2 * `layers`."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                ends = name.endswith(("attention.out.weight", "mlp.2.weight"))
                parameter.normal_(std=0.02 / math.sqrt(2 * layers) if ends else 0.02)


class Block(nn.Module):
    """Attention and a network of two layers, each added to what it gets normalised."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width))
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """What each place takes from itself and the places before it. The number of heads follows from the outputs of
    `query`, `key` and `value`, so that these may be divided by heads.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # see above
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        dropout = self.dropout if self.training else 0.0
        taken = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(taken.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * head width) as (B, heads, T, head width)."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
