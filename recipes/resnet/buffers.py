"""Memory of batches that is used again once nobody holds a batch. New memory comes from the system page by page, which
takes as long as a fifth of decoding.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

MOST_KEPT = 4
"""Blocks that lie ready: batches fetched ahead are given back at about the same time when a run ends."""


class Buffers:
    """Lends memory of the host. Threads may take at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of any content. Its memory comes back when it and all its views are gone."""
        size = math.prod(shape)
        try:
            block = self._free.pop()
        except IndexError:
            block = torch.empty(size, dtype=dtype)
        if block.dtype is not dtype or not size <= block.numel() <= 2 * size:
            block = torch.empty(size, dtype=dtype)
        lent = block.numpy()[:size].reshape(shape)
        weakref.finalize(lent, self._take_back, block).atexit = False
        return torch.from_numpy(lent)  # its storage holds `lent`

    def _take_back(self, block: Tensor) -> None:
        if len(self._free) < MOST_KEPT:
            self._free.append(block)
