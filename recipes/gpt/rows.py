"""Rows of bytes: the inputs are a row's bytes but the last, the targets its bytes but the first."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Dataset
from dtf.model.losses import IGNORED
from dtf.recipes.gpt.text import Text
from dtf.recipes.gpt.words import Words


class Generated(Dataset):
    """Rows of generated text, drawn as they are read."""

    def __init__(self, language: Words, rows: int, length: int, split: str) -> None:
        self._language, self._rows, self._length, self._split = language, rows, length, split

    def __len__(self) -> int:
        return self._rows

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        text = torch.from_numpy(self._language.draw(ids, self._length, self._split).text).long()
        return text[:, :-1], text[:, 1:]

    def best_possible(self) -> dict[str, float]:
        """The loss of the true probabilities over these rows. No model can be expected to be better."""
        nats = self._language.draw(np.arange(self._rows), self._length, self._split).nats
        loss = float(nats.mean()) / self._length
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def fingerprint(self) -> str:
        return f"{self._rows} rows of {self._length} bytes, {self._language.about()}, {self._split}"


class FromFiles(Dataset):
    """The bytes `first` to `last` of a text, each predicted once: row i has those from first + i * length on, and as
    its first input the byte before them. The last row may have fewer; its other targets are IGNORED.
    """

    def __init__(self, text: Text, first: int, last: int, length: int) -> None:
        """`first`: at least 1, as nothing comes before the first byte of a text."""
        self._text, self._first, self._last, self._length = text, first, last, length

    def __len__(self) -> int:
        return math.ceil((self._last - self._first) / self._length)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        inputs = torch.zeros(len(ids), self._length, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        for place, number in enumerate(ids.tolist()):
            first = self._first + number * self._length
            count = min(self._length, self._last - first)
            row = torch.from_numpy(self._text.read(first - 1, count + 1)).long()
            inputs[place, :count], targets[place, :count] = row[:-1], row[1:]
        return inputs, targets

    def fingerprint(self) -> str:
        return f"bytes {self._first} to {self._last} in rows of {self._length} of {self._text.digest()}"
