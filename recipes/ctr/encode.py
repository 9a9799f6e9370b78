"""From rows of a log to inputs of a model: transformed integers, and ids of table rows.

Reads no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from dtf.recipes.ctr.hashing import key_of, look_up, to_range
from dtf.recipes.ctr.lines import NONE
from dtf.recipes.ctr.log import BagKeys, Parsed
from dtf.recipes.ctr.vocabulary import Vocabulary


@dataclass(frozen=True)
class Encoder:
    """`integers`: `log`, `raw` or `bucket`. Ids are those of the vocabulary, if there is one, else keys modulo
    `table_size`, or the keys themselves where that is 0.

    `given`: keys are ids that the log holds, not hashes.
    """

    integers: str
    table_size: int
    vocabulary: Vocabulary | None = None
    given: bool = False

    def encode(self, parsed: Parsed) -> tuple[np.ndarray | None, np.ndarray]:
        """`dense` (B, D) float32, None where D is 0, and `ids` (B, F) int64."""
        keys = self.keys(parsed)
        ids = keys if not self.table_size and self.vocabulary is None else np.empty_like(keys)
        if self.vocabulary is not None:
            look_up(keys, self.vocabulary.table, self.vocabulary.numbers, self.vocabulary.rare, ids)
        elif self.table_size:
            to_range(keys, self.table_size, ids)
        if self.integers == "bucket" or not parsed.numbers.shape[1]:
            return None, ids
        dense = np.empty(parsed.numbers.shape, np.float32)
        (log_of if self.integers == "log" else plain_of)(parsed.numbers, dense)
        return dense, ids

    def bags(self, parsed: Parsed) -> BagKeys | None:
        """Ids of fields that have any number of values, None where there are none."""
        if parsed.bags is None:
            return None
        values, (keys, _) = np.empty_like(parsed.bags.values), parsed.bags
        if self.vocabulary is not None:
            fields = parsed.bags.by_field()
            for rare, of_field in zip(self.vocabulary.rare[-1 - len(fields) : -1], fields, strict=True):
                ids = np.empty((int(of_field.sum()), 1), np.int64)
                look_up(keys[of_field, None], self.vocabulary.table, self.vocabulary.numbers, np.array([rare]), ids)
                values[of_field] = ids[:, 0]
        elif self.table_size:
            to_range(keys[:, None], self.table_size, values[:, None])
        else:
            values = keys
        return parsed.bags._replace(values=values)

    def about(self) -> str:
        """Text that is another one when the encoder makes other numbers."""
        hashed = "given" if self.given else f"hashed to {self.table_size or 'any'}"
        return f"integers {self.integers}, ids {f'vocabulary {self.vocabulary.digest}' if self.vocabulary else hashed}"

    def by_field(self, parsed: Parsed) -> list[np.ndarray]:
        """The keys of each field, those of bags last."""
        bags = parsed.bags
        return [*self.keys(parsed).T, *([bags.values[each] for each in bags.by_field()] if bags is not None else [])]

    def keys(self, parsed: Parsed) -> np.ndarray:
        """Keys of all categories (B, F); with `bucket` those of the integers come first."""
        if self.integers != "bucket" or not parsed.numbers.shape[1]:
            return parsed.keys
        integers = parsed.numbers.shape[1]
        keys = np.empty((len(parsed.keys), integers + parsed.keys.shape[1]), np.int64)
        keys[:, integers:] = parsed.keys
        bucket_keys(parsed.numbers, keys)
        return keys


@njit(cache=True, nogil=True)
def log_of(numbers, dense):
    """sign(x) log(1 + |x|), 0 where there is no number."""
    for i in range(numbers.shape[0]):
        for d in range(numbers.shape[1]):
            x = numbers[i, d]
            value = math.log1p(abs(np.float64(x)))
            dense[i, d] = 0.0 if x == NONE else (-value if x < 0 else value)


@njit(cache=True, nogil=True)
def plain_of(numbers, dense):
    """The number, 0 where there is none."""
    for i in range(numbers.shape[0]):
        for d in range(numbers.shape[1]):
            dense[i, d] = 0.0 if numbers[i, d] == NONE else numbers[i, d]


@njit(cache=True, nogil=True)
def bucket_keys(numbers, keys):
    """Column d of `keys` is hash(d, floor(log(x)^2)) for x > 2, else hash(d, x), as the winners of Kaggle's Criteo
    challenge 2014 did it.
    """
    for i in range(numbers.shape[0]):
        for d in range(numbers.shape[1]):
            x = numbers[i, d]
            if x == NONE:
                keys[i, d] = -1
            else:
                # 1 and more; -1 and less
                bucket = np.int64(math.floor(math.log(np.float64(x)) ** 2)) if x > 2 else x - 3
                keys[i, d] = key_of(d, np.uint64(bucket))
