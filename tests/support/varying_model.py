"""The model of tests/support/varying_toy.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Tagger(nn.Module):
    """Scores (B, T, 4) of each word, which depend on the mean over the T words and the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.marks = nn.Embedding(11, 8), nn.Linear(3, 8)
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, row: Any) -> Tensor:
        words = self.words(row.words)
        x = words + words.mean(1, keepdim=True) + self.marks(row.lists[0]["marks"])[:, None]
        x = x + self.down(self.drop(self.up(x).tanh()))
        return self.head(x + row.lists[1][0][:, None, None])  # a part of the inputs that a later block needs first
