"""The ids that a batch has for one table, in one input or several: each once, with what puts rows in their place, pools
those of bags, and sums gradients by id. Knows no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtf.api.sparse_table import Pooling
from dtf.core.errors import ConfigError
from dtf.core.nest import Bags
from dtf.core.types import Batch
from dtf.sparse.id_arrays import add_segments, gather, segment_sum, unique

_ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)


class _Input(NamedTuple):
    """Ids of one input."""

    name: str
    shape: tuple[int, ...]  # of what the model gets, but for the width
    device: torch.device
    ids: np.ndarray  # (n,)
    lengths: np.ndarray | None  # of bags, row after row; None: each id is for itself
    per_row: np.ndarray | int  # ids of each row of the batch


class TableInputs:
    """The ids of one table in a batch. `distinct` (U,): each once, in the order in which they first appear."""

    def __init__(self, inputs: Mapping[str, Any], names: Sequence[str], pooling: Pooling | None) -> None:
        """`names`: of the inputs that hold the table's ids. ConfigError for what are no ids, and for bags that it does
        not pool.
        """
        self.names, self._pooling = tuple(names), pooling
        self._parts = [_input(name, inputs[name], pooling) for name in names]
        ids = [part.ids for part in self._parts]
        self.distinct, self._inverse = unique(ids[0] if len(ids) == 1 else np.concatenate(ids))
        self._ends = np.cumsum([len(each) for each in ids]).tolist()
        none = np.flatnonzero(self.distinct == -1)
        self._none = int(none[0]) if len(none) else -1  # the place of the id that stands for nothing
        self._winners: dict[str, np.ndarray] = {}  # of max pooling, by input

    @property
    def real(self) -> int:
        """How many ids there are, -1 left out."""
        return len(self._inverse) - (int((self._inverse == self._none).sum()) if self._none >= 0 else 0)

    def rows(self, rows: np.ndarray) -> dict[str, Tensor]:
        """What the model gets, by input: the rows (U, width) of `distinct` in place of ids, on the ids' device."""
        return {
            part.name: self._rows_of(part, inverse, rows)
            for part, inverse in zip(self._parts, self._cut(), strict=True)
        }

    def gradients(
        self, gradients: Mapping[str, Tensor], width: int, dtype: np.dtype | type | None = None
    ) -> np.ndarray:
        """Sums (U, width) by id, from the gradients of what `rows` gave, by input; 0 for an input that has none.

        `dtype`: that of the sums; None: that of the gradients.
        """
        given = {
            name: gradients[name].detach().cpu().numpy().reshape(-1, width) for name in self.names if name in gradients
        }
        dtype = dtype or next((flat.dtype for flat in given.values()), np.dtype(np.float32))
        sums = np.zeros((len(self.distinct), width), dtype)
        for part, inverse in zip(self._parts, self._cut(), strict=True):
            if part.name in given:
                flat = np.ascontiguousarray(given[part.name], dtype)
                self._add(part, inverse, flat, sums)
        if self._none >= 0:
            sums[self._none] = 0
        return sums

    def seen(self, batch: Batch, clicks: Any) -> np.ndarray:
        """How often each distinct id was shown, and clicked: (U, 2) float32; in padding 0. `clicks`: see
        `Recipe.clicks`. ConfigError for clicks of another form.
        """
        shown = (batch.weight != 0).cpu()
        rows = torch.stack([shown, shown & _clicked(clicks, batch)], 1).numpy().astype(np.float32)
        real = [part for part in self._parts if part.device.type != "meta"]
        return self.summed(np.concatenate([rows[:0], *(np.repeat(rows, part.per_row, axis=0) for part in real)]))

    def summed(self, each: np.ndarray) -> np.ndarray:
        """Sums (U, columns) by id of what each position has, (n, columns): those of all inputs in turn."""
        return segment_sum(each.astype(np.float32, copy=False), self._inverse, len(self.distinct))

    def _cut(self) -> list[np.ndarray]:
        """The place of each id among `distinct`, by input."""
        return np.split(self._inverse, self._ends[:-1]) if len(self._parts) > 1 else [self._inverse]

    def _rows_of(self, part: _Input, inverse: np.ndarray, rows: np.ndarray) -> Tensor:
        shape = (*part.shape, rows.shape[1])
        if part.device.type == "meta":  # of a rank that computes none of the first layers
            kind = torch.float64 if rows.dtype == np.float64 else torch.float32
            return torch.empty(shape, dtype=kind, device="meta")
        if part.lengths is None:
            out = gather(rows, inverse, np.empty((len(inverse), rows.shape[1]), rows.dtype))
        else:
            out = self._pooled(part.name, part.lengths, inverse, np.ascontiguousarray(rows))
        return torch.from_numpy(out).view(shape).to(part.device)

    def _pooled(self, name: str, lengths: np.ndarray, inverse: np.ndarray, rows: np.ndarray) -> np.ndarray:
        from dtf.sparse import pool_kernels

        out = np.zeros((len(lengths), rows.shape[1]), rows.dtype)
        if self._pooling is Pooling.max:
            winners = self._winners[name] = np.empty(out.shape, np.int32)
            pool_kernels.pool_max(rows, inverse, lengths, self._none, out, winners)
            return out
        pool_kernels.pool_sum(rows, inverse, lengths, self._none, out)
        if self._pooling is Pooling.mean:
            out /= self._counts(lengths, inverse)
        return out

    def _counts(self, lengths: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """What a mean divides by, (bags, 1); 1 for a bag without ids."""
        from dtf.sparse import pool_kernels

        counts = lengths.copy()
        if self._none >= 0:
            pool_kernels.count(inverse, lengths, self._none, counts)
        return np.maximum(counts, 1)[:, None]

    def _add(self, part: _Input, inverse: np.ndarray, flat: np.ndarray, sums: np.ndarray) -> None:
        """Add the gradients of one input, (positions or bags, width), to the sums by id."""
        if part.lengths is None:
            add_segments(flat, inverse, sums)
            return
        from dtf.sparse import pool_kernels

        if self._pooling is Pooling.max:
            pool_kernels.give_max(flat, self._winners.pop(part.name), sums)
            return
        if self._pooling is Pooling.mean:
            flat = (flat / self._counts(part.lengths, inverse)).astype(flat.dtype, copy=False)
        pool_kernels.give_sum(flat, inverse, part.lengths, sums)


def _clicked(clicks: Any, batch: Batch) -> Tensor:
    """Which rows are clicks, bool (B,) on CPU."""
    if clicks is None or (given := clicks(batch.targets)) is None:
        return torch.zeros(len(batch.weight), dtype=torch.bool)
    if not isinstance(given, Tensor) or given.shape != batch.weight.shape:
        what = f"a tensor {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ConfigError(
            f"{clicks.__qualname__}() returned {what} for {len(batch.weight)} rows; it must return a tensor "
            f"({len(batch.weight)},), not 0 where a row is a click, or None"
        )
    given = given.detach().cpu()
    return (given != 0) & ~given.isnan()


def _input(name: str, value: Any, pooling: Pooling | None) -> _Input:
    none = np.empty(0, np.int64)
    if not isinstance(value, Bags):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if kind not in _ID_TYPES:
            raise ConfigError(
                f"inputs[{name!r}] are {kind}, and ids of a sparse table are int64 or smaller integers; convert "
                "them with .long()"
            )
        ids = none if value.is_meta else value.cpu().numpy().reshape(-1)
        each = value.numel() // max(1, len(value))
        return _Input(name, tuple(value.shape), value.device, ids, None, each)
    if pooling is None:
        raise ConfigError(
            f"inputs[{name!r}] are Bags, and their table does not say how rows of a bag are pooled; give it "
            "Table(pooling=Pooling.sum), mean or max"
        )
    shape = tuple(value.lengths.shape)
    if fault := value.fault(shape[0] if shape else 0):
        raise ConfigError(f"inputs[{name!r}] are Bags with {fault}; each row has as many values as its lengths say")
    if value.lengths.is_meta:
        return _Input(name, shape, value.lengths.device, none, none, 0)
    lengths = np.ascontiguousarray(value.lengths.cpu().numpy())
    per_row = lengths if lengths.ndim == 1 else lengths.sum(1)
    return _Input(name, shape, value.values.device, value.values.cpu().numpy(), lengths.reshape(-1), per_row)
