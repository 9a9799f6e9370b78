"""A vocabulary: the values that occur often enough in each field of a log, numbered without gaps.

It is made in one pass over the training split.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtf.recipes.ctr.hashing import MISSING, count_keys, fill_table


class Vocabulary:
    """The ids of field f are `rare[f]` to `rare[f + 1]` - 1. The id `rare[f]` is shared by all values that are not in
    `keys`.

    Keys of different fields differ.
    """

    def __init__(self, keys: np.ndarray, rare: np.ndarray) -> None:
        """`keys`: those of each field in turn, ascending; `rare` (F + 1,), the last being the number of ids."""
        self.keys, self.rare = keys, rare
        self.table = np.full(_power_of_two(2 * len(keys)), MISSING, np.int64)
        self.numbers = np.empty_like(self.table)
        numbers = (
            np.concatenate([np.arange(first + 1, end) for first, end in itertools.pairwise(rare)])
            if len(keys)
            else keys
        )
        fill_table(self.table, self.numbers, keys, numbers)
        self.digest = f"{zlib.crc32(rare.data, zlib.crc32(keys.data)):08x}"

    def __len__(self) -> int:
        """Ids, those for rare values included."""
        return int(self.rare[-1])

    def save(self, folder: Path) -> dict[str, Any]:
        np.save(folder / "keys.npy", self.keys)
        np.save(folder / "rare.npy", self.rare)
        return {}

    @staticmethod
    def load(folder: Path) -> Vocabulary:
        return Vocabulary(*(np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("keys", "rare")))


def count(blocks: Iterable[Sequence[np.ndarray]], fields: int, least: int) -> Vocabulary:
    """The values that occur at least `least` times in `blocks`, each the keys (n,) of every field. Their order does not
    change the result.

    Memory: 32 to 64 bytes for each value that occurs at all.
    """
    tables = [_Counts() for _ in range(fields)]
    for keys in blocks:
        for field, table in enumerate(tables):
            table.add(np.ascontiguousarray(keys[field]))
    often = [np.sort(table.keys[(table.keys != MISSING) & (table.counts >= least)]) for table in tables]
    rare = np.concatenate([[0], np.cumsum([1 + len(keys) for keys in often])]).astype(np.int64)
    return Vocabulary(np.concatenate(often).astype(np.int64), rare)


class _Counts:
    """Occurrences of the keys of one field."""

    def __init__(self) -> None:
        self.keys, self.counts, self._used = np.full(1024, MISSING, np.int64), np.zeros(1024, np.int64), 0

    def add(self, keys: np.ndarray) -> None:
        while True:
            self._used, done = count_keys(self.keys, self.counts, self._used, keys)
            if done == len(keys):
                return
            keys = keys[done:]
            table, counts = np.full(2 * len(self.keys), MISSING, np.int64), np.zeros(2 * len(self.keys), np.int64)
            old = self.keys != MISSING
            fill_table(table, counts, self.keys[old], self.counts[old])
            self.keys, self.counts = table, counts


def _power_of_two(least: int) -> int:
    return 1 << max(1, (least - 1).bit_length())
