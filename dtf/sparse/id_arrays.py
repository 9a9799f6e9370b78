"""Loops over arrays of ids and rows: distinct ids, rows in place of them, sums by id. Numpy arrays, no torch."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from dtf.api.sparse_table import NO_NUMBA
from dtf.core.errors import ConfigError


def unique(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values (U,) of ids (n,) in order of first appearance, and the index of each id in them (n,) int32. -1 is
    a value like any other.
    """
    ids = np.ascontiguousarray(ids, np.int64)
    distinct, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
    slots = np.zeros(2 << max(1, len(ids)).bit_length(), np.int32)
    count = kernels().unique(ids, slots, distinct, inverse)
    return distinct[:count], inverse


def gather(rows: np.ndarray, inverse: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out[i] = rows[inverse[i]]: the rows (U, width) of `unique` ids, for all n ids, written to `out` (n, width) of the
    same dtype.
    """
    if out.shape != (len(inverse), rows.shape[1]):
        raise ValueError(f"rows {rows.shape} for {len(inverse)} ids do not fit into {out.shape}")
    kernels().gather(rows, inverse, out)
    return out


def segment_sum(gradients: np.ndarray, inverse: np.ndarray, count: int) -> np.ndarray:
    """Sums (count, width) of the gradients (n, width) of each distinct id, added in their order."""
    sums = np.zeros((count, gradients.shape[1]), gradients.dtype)
    add_segments(gradients, inverse, sums)
    return sums


def add_segments(gradients: np.ndarray, inverse: np.ndarray, sums: np.ndarray) -> None:
    """Add the gradients (n, width) of each distinct id to its sum (U, width), in their order."""
    if len(gradients) != len(inverse):
        raise ValueError(f"{len(gradients)} gradients of {len(inverse)} ids")
    kernels().segment_sum(np.ascontiguousarray(gradients), inverse, sums)


def squares(values: np.ndarray) -> float:
    """Sum of the squares of all elements in float64, the same bits on every machine."""
    return float(kernels().squares(np.ascontiguousarray(values).reshape(-1)))


def kernels() -> ModuleType:
    try:
        from dtf.sparse import id_kernels
    except ModuleNotFoundError as error:
        raise ConfigError(f"{NO_NUMBA} ({error})") from error
    return id_kernels
