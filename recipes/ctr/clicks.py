"""A click log that is generated: each row a function of (seed, number) alone, with a known probability of its click.

Needs no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dtf.api.recipe import Dataset
from dtf.core.nest import Bags
from dtf.core.seeding import seed_of
from dtf.recipes.ctr.encode import log_of
from dtf.recipes.ctr.lines import NONE
from dtf.sparse.id_kernels import mix

INTEGERS = 13
QUEUE_ROWS = 16_384
SHARES = (1.25, 0.8, 0.5)
"""Standard deviation of the parts of a logit: effects of single ids, of pairs of ids, and of the integers."""

BIAS = -1.3
_PILOT_ROWS = 1 << 14
_SMALLEST = 4  # ids of the smallest field
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class World:
    """The distribution that all rows are drawn from. `offsets` (F + 1,): the ids of field f are offsets[f] to
    offsets[f + 1] - 1, the most frequent first.

    A logit is BIAS plus three parts, each scaled to its share: effects of the ids, products of hidden vectors of four
    numbers for some pairs of fields, and a weighted sum of the integers' logarithms.
    """

    key: int
    offsets: np.ndarray
    skew: float
    centres: np.ndarray  # (3,) of the parts
    scales: np.ndarray  # (3,)

    @staticmethod
    def make(seed: int, fields: int, ids: int, skew: float) -> World:
        """Sizes of fields rise geometrically. The parts are scaled by their deviation over a sample of rows."""
        offsets = np.concatenate([[0], np.cumsum(_sizes(fields, ids))]).astype(np.int64)
        bare = World(seed_of(seed, "world"), offsets, skew, np.zeros(3), np.ones(3))
        parts = bare.draw(np.arange(_PILOT_ROWS), seed_of(seed, "pilot")).parts
        spread = parts.std(axis=0)
        scales = np.divide(SHARES, spread, out=np.zeros(3), where=spread > 0)
        return World(bare.key, offsets, skew, parts.mean(axis=0), scales)

    def draw(self, rows: np.ndarray, stream: int) -> Drawn:
        """The rows with these numbers, of a stream of them."""
        fields = len(self.offsets) - 1
        ids, numbers = np.empty((len(rows), fields), np.int64), np.empty((len(rows), INTEGERS), np.int64)
        dense, parts, chance = np.empty(numbers.shape, np.float32), np.empty((len(rows), 3)), np.empty(len(rows))
        _draw(rows, np.uint64(stream), np.uint64(self.key), self.offsets, self.skew, ids, numbers, parts, chance)
        log_of(numbers, dense)
        _add_integers(dense, np.uint64(self.key), parts)
        probabilities = 1 / (1 + np.exp(-BIAS - (parts - self.centres) @ self.scales))
        return Drawn(ids, numbers, dense, parts, probabilities, (chance < probabilities).astype(np.float32))


@dataclass(frozen=True)
class Drawn:
    ids: np.ndarray  # (B, F)
    numbers: np.ndarray  # (B, 13) int64, NONE where there is none
    dense: np.ndarray  # (B, 13) float32: the numbers as recipe.data.integers=log has them
    parts: np.ndarray  # (B, 3) of the logit, unscaled
    probabilities: np.ndarray  # (B,)
    labels: np.ndarray  # (B,) float32


class Generated(Dataset):
    """Rows as `clicklog.Clicks` has them."""

    def __init__(self, world: World, rows: int, seed: int, split: str, threads: int, bag_values: int = 0) -> None:
        """`bag_values`: see `ClicksOptions`."""
        self._world, self._rows, self._stream, self._bag_values = world, rows, seed_of(seed, split), bag_values
        self._bag_stream = seed_of(seed, split, "bags")
        self.queue_rows, self.threads = QUEUE_ROWS, threads

    @property
    def offsets(self) -> np.ndarray:
        """See `World`."""
        return self._world.offsets

    def __len__(self) -> int:
        return self._rows

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        drawn = self.draw(ids)
        inputs: dict[str, Any] = {"ids": torch.from_numpy(drawn.ids), "dense": torch.from_numpy(drawn.dense)}
        if self._bag_values:
            inputs["bags"] = self._bags(np.ascontiguousarray(ids))
        return inputs, torch.from_numpy(drawn.labels)

    def _bags(self, rows: np.ndarray) -> Bags:
        """Values of the last field, (B, 1) bags."""
        lengths, world = np.empty((len(rows), 1), np.int64), self._world
        first, last = world.offsets[-2:].tolist()
        _draw_lengths(rows, np.uint64(self._bag_stream), self._bag_values, lengths)
        values = np.empty(int(lengths.sum()), np.int64)
        _draw_bags(rows, np.uint64(self._bag_stream), first, last, world.skew, lengths, values)
        return Bags(torch.from_numpy(values), torch.from_numpy(lengths))

    def fingerprint(self) -> str:
        bags = f", bags of {self._bag_values}" if self._bag_values else ""
        world = f"{self._world.offsets.tolist()}, skew {self._world.skew}"
        return f"{self._rows} generated clicks, {self._stream}, {world}{bags}"

    def draw(self, rows: np.ndarray) -> Drawn:
        return self._world.draw(np.ascontiguousarray(rows), self._stream)

    def best_possible(self) -> dict[str, float]:
        """AUC and log loss of the true probabilities over all rows. No model can be expected to be better."""
        parts = [
            self.draw(np.arange(first, min(first + (1 << 16), self._rows))) for first in range(0, self._rows, 1 << 16)
        ]
        chances, labels = (
            np.concatenate([part.probabilities for part in parts]),
            np.concatenate([part.labels for part in parts]),
        )
        return {
            "auc": _auc(chances, labels),
            "loss": float(-np.log(np.where(labels == 1, chances, 1 - chances)).mean()),
        }


def write_criteo(data: Generated, path: Path, chunk: int = 1 << 15) -> None:
    """The rows as lines of a Criteo log; needs 26 fields."""
    with open(path, "wb") as file:
        for first in range(0, len(data), chunk):
            drawn = data.draw(np.arange(first, min(first + chunk, len(data))))
            buffer = np.empty(len(drawn.labels) * (2 + 20 * INTEGERS + 9 * drawn.ids.shape[1]), np.uint8)
            file.write(buffer.data[: _lines(drawn.labels, drawn.numbers, drawn.ids, buffer)])


def _sizes(fields: int, ids: int) -> list[int]:
    """So many ids for each field, ids in all, rising geometrically from _SMALLEST where there are enough."""
    smallest, low, high = min(_SMALLEST, ids / fields), 1.0, float(ids)
    for _ in range(200):
        ratio = (low + high) / 2
        total = sum(smallest * ratio**i for i in range(fields)) if fields * math.log(ratio) < 600 else math.inf
        low, high = (ratio, high) if total < ids else (low, ratio)
    ends = np.floor(np.cumsum([smallest * low**i for i in range(fields)]) + 0.5).astype(int).tolist()
    ends[-1] = ids
    return np.diff([0, *ends]).tolist()


def _auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of the pairs of a click and none in which the click has the higher score; ties count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    clicks = float(labels.sum())
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


@njit(cache=True, nogil=True)
def _uniform(x):
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True)
def _bell(x):
    """A number about normal, mean 0 and standard deviation 1, from 64 bits: the sum of four of 16 bits."""
    total = np.float64(0)
    for k in range(4):
        total += np.float64((x >> np.uint64(16 * k)) & np.uint64(0xFFFF))
    return (total / 65535 - 2) * math.sqrt(3.0)


@njit(cache=True, nogil=True)
def _product(x, y):
    """Of two hidden vectors of four numbers in [-1, 1], each in 64 bits."""
    total = np.float64(0)
    for k in range(4):
        a, b = (x >> np.uint64(16 * k)) & np.uint64(0xFFFF), (y >> np.uint64(16 * k)) & np.uint64(0xFFFF)
        total += (np.float64(a) / 32767.5 - 1) * (np.float64(b) / 32767.5 - 1)
    return total


@njit(cache=True, nogil=True)
def _place(u, size, skew):
    """The place of a value among `size`, from a uniform number: its density falls as place ** -skew from 1 on."""
    power = 1 - skew
    reach = math.log(size + 1.0) if power == 0 else (size + 1.0) ** power - 1
    place = math.exp(u * reach) if power == 0 else (1 + u * reach) ** (1 / power)
    return min(np.int64(place) - 1, size - 1)


@njit(cache=True, nogil=True)
def _draw_lengths(rows, stream, most, lengths):
    for i in range(len(rows)):
        lengths[i, 0] = np.int64(_uniform(mix(stream + np.uint64(rows[i]) * _GOLDEN)) * (most + 1))


@njit(cache=True, nogil=True)
def _draw_bags(rows, stream, first, last, skew, lengths, values):
    at = 0
    for i in range(len(rows)):
        x = mix(stream + np.uint64(rows[i]) * _GOLDEN)
        for _ in range(lengths[i, 0]):
            x += _GOLDEN
            values[at] = first + _place(_uniform(mix(x)), last - first, skew)
            at += 1


@njit(cache=True, nogil=True)
def _draw(rows, stream, key, offsets, skew, ids, numbers, parts, chance):
    fields = len(offsets) - 1
    paired = fields // 2 // 2 * 2  # of the smaller half of the fields: the first with the last of them, and so on
    power = 1 - skew
    reach = np.empty(fields)
    for f in range(fields):
        size = offsets[f + 1] - offsets[f]
        reach[f] = math.log(size + 1.0) if power == 0 else (size + 1.0) ** power - 1
    for i in range(len(rows)):
        x = mix(stream + np.uint64(rows[i]) * _GOLDEN)
        single, pairs = 0.0, 0.0
        for f in range(fields):
            x += _GOLDEN
            u = _uniform(mix(x))
            # density falls as place ** -skew from 1 on
            place = math.exp(u * reach[f]) if power == 0 else (1 + u * reach[f]) ** (1 / power)
            ids[i, f] = min(np.int64(place) - 1, offsets[f + 1] - offsets[f] - 1) + offsets[f]
            single += _bell(mix(key ^ mix(np.uint64(ids[i, f]))))
        for f in range(paired // 2):
            one, other = (
                mix(key + _GOLDEN ^ mix(np.uint64(ids[i, f]))),
                mix(key + _GOLDEN ^ mix(np.uint64(ids[i, paired - 1 - f]))),
            )
            pairs += _product(one, other)
        parts[i, 0], parts[i, 1] = single, pairs
        for d in range(numbers.shape[1]):
            x += _GOLDEN
            u = _uniform(mix(x))
            numbers[i, d] = NONE if u < 1 / 16 else np.int64(math.exp(6 * u * u)) - 1  # 0 to 402, most of them small
        chance[i] = _uniform(mix(x + _GOLDEN))


@njit(cache=True, nogil=True)
def _add_integers(dense, key, parts):
    for i in range(dense.shape[0]):
        total = 0.0
        for d in range(dense.shape[1]):
            total += dense[i, d] * _bell(mix(key - np.uint64(d + 1) * _GOLDEN))
        parts[i, 2] = total


@njit(cache=True, nogil=True)
def _lines(labels, numbers, ids, out):
    at = 0
    for i in range(len(labels)):
        out[at] = 49 if labels[i] == 1 else 48
        at += 1
        for d in range(numbers.shape[1]):
            out[at] = 9
            at += 1
            value = numbers[i, d]
            if value != NONE:
                digits = 1
                while value >= 10**digits:
                    digits += 1
                for k in range(digits):
                    out[at + digits - 1 - k] = 48 + value % 10
                    value //= 10
                at += digits
        for f in range(ids.shape[1]):
            out[at] = 9
            # an odd factor: different ids stay different
            value = np.uint64(ids[i, f]) * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)
            for k in range(8):
                digit = np.int64(value >> np.uint64(28 - 4 * k) & np.uint64(15))
                out[at + 1 + k] = 48 + digit if digit < 10 else 87 + digit
            at += 9
        out[at] = 10
        at += 1
    return at
