"""Rows of any map-style `torch.utils.data.Dataset`, with its collate function, as a dtf Dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from dtf.api.recipe import Dataset
from dtf.core import nest
from dtf.core.errors import ConfigError
from dtf.data.row_draws import drawn_batch

_FEW = 4  # keys that an error offers
REMEDY = "write its samples once, dtf.write_samples(data, FOLDER), and read them by number: dtf.tar_samples(FOLDER)"


def map_style(
    rows: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    target: str | int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    shapes_vary: bool | None = None,
) -> Dataset:
    """The rows of a map-style data set: of anything with `__len__` and `__getitem__` (or `__getitems__`).

    `collate_fn`: makes a batch of a list of items, by default torch's `default_collate`. Without `target` it gives
    (inputs, targets). `target`: the key, field or place of the targets in a batch of another form; the rest are the
    inputs, as a dict or a tuple. `threads`: batches that are read at once, of all splits, by default one (files that
    dtf decodes: two); with more than one, `rows` must be thread-safe. `seed`: seeds the global generators of torch,
    NumPy and Python before each item, from the seed, the epoch and the number of the row, for random transforms in
    `__getitem__`, and before each call of a `collate_fn`, from the numbers of its rows; rows are then read between
    steps. `shapes_vary`: see `Dataset.shapes_vary`; by default True where there is a `collate_fn`.

    ConfigError for what has no numbers, such as an `IterableDataset`.
    """
    return MapStyle(rows, collate_fn, target, threads, seed, shapes_vary)


class MapStyle(Dataset):
    """See `map_style`."""

    _one_at_a_time = threading.RLock()
    """Held while rows are read that need not be thread-safe: training rows are read ahead during an evaluation, and
    both splits may have one file open.
    """

    def __init__(
        self,
        rows: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        target: str | int | None,
        threads: int | None,
        seed: int | None,
        shapes_vary: bool | None,
    ) -> None:
        refuse_streams(rows)
        self.threads = threads if threads is not None else getattr(rows, "decoding_threads", 1) if seed is None else 1
        if seed is not None and self.threads > 1:
            raise ConfigError(f"threads={threads}: with a seed, rows are read one after the other; leave threads out")
        self.items = rows
        self.is_plain = collate_fn is None and target is None  # nothing says how its items become a batch
        self._seed, self._target = seed, target
        if seed is not None:  # the generators are those of the model's passes too
            self.prefetch = 0
        self._collate = default_collate if collate_fn is None else collate_fn
        self.shapes_vary = collate_fn not in (None, default_collate) if shapes_vary is None else shapes_vary
        self._at_once = getattr(rows, "__getitems__", None)
        if isinstance(left_out := getattr(rows, "left_out", None), Mapping):
            self.left_out = left_out

    @property
    def batch_source(self) -> str:
        """What makes a batch, for messages."""
        return f"the collate function of dtf.map_style({type(self.items).__name__})"

    def __len__(self) -> int:
        return len(self.items)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Any]:
        with self._one_at_a_time if self.threads == 1 else nullcontext():
            return self._divided(_plain(self._batch(ids.tolist(), epoch)))

    def _batch(self, numbers: list[int], epoch: int) -> Any:
        if self._seed is None:
            return self._collated(self._items(numbers))
        keys = self._seed, epoch
        return drawn_batch(self._items, self._collated, numbers, keys, self.shapes_vary, self.batch_source)

    def _items(self, numbers: list[int]) -> list[Any]:
        if self._at_once is not None:
            return list(self._at_once(numbers))
        return [self._item(number) for number in numbers]

    def _item(self, number: int) -> Any:
        """A frame of its own, in which an error finds the number of the row."""
        return self.items[number]

    def _collated(self, items: list[Any]) -> Any:
        """ConfigError where `default_collate` makes no batch of the items."""
        if self._collate is not default_collate:
            return self._collate(items)
        try:
            return default_collate(items)
        except (TypeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "equal size" not in str(error):
                raise
            raise ConfigError(
                f"dtf.map_style({type(self.items).__name__}): torch's default_collate makes no batch of its items: "
                f"{error}; return tensors of one shape, arrays or numbers from __getitem__, or give a collate_fn"
            ) from error

    def _divided(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a collated batch."""
        target, who = self._target, f"dtf.map_style({type(self.items).__name__})"
        if isinstance(batch, dict) or nest.is_named_tuple(batch):
            fields = batch if isinstance(batch, dict) else batch._asdict()
            if target is None and not isinstance(batch, dict) and len(batch) == 2:
                return batch[0], batch[1]
            if target not in fields:
                known = ", ".join(map(str, fields))
                wants = (
                    f"target={target!r} is none of its keys"
                    if target is not None
                    else "nothing says which is the target"
                )
                keys = " or ".join(f"target={key!r}" for key in [*fields][:_FEW]) + ", ..." * (len(fields) > _FEW)
                raise ConfigError(f"{who}: a batch has {known}, and {wants}; give the key of the targets: {keys}")
            return {key: value for key, value in fields.items() if key != target}, fields[target]
        if not isinstance(batch, list | tuple):
            raise ConfigError(f"{who}: a batch is a {type(batch).__name__}; return (inputs, targets), or a dict")
        if target is None and len(batch) == 2:
            return batch[0], batch[1]
        if not isinstance(target, int) or not -len(batch) <= target < len(batch):
            wants = "nothing says which is the target" if target is None else f"target={target!r} is none of them"
            raise ConfigError(f"{who}: a batch has {len(batch)} parts, and {wants}; give its place, target=-1")
        place = target % len(batch)
        rest = tuple(value for number, value in enumerate(batch) if number != place)
        return rest[0] if len(rest) == 1 else rest, batch[place]

    def groups(self) -> np.ndarray | None:
        classes = getattr(self.items, "targets", None)
        if not isinstance(classes, list | np.ndarray | Tensor) or len(classes) != len(self):
            return None
        numbers = np.asarray(classes)
        return numbers.astype(np.int64) if numbers.ndim == 1 and numbers.dtype.kind in "iu" else None

    def fingerprint(self) -> str:
        own = getattr(self.items, "fingerprint", None)
        return str(own()) if callable(own) else f"{type(self.items).__name__} {len(self)}"


def refuse_streams(rows: Any) -> None:
    """Raise ConfigError for data whose rows have no numbers."""
    from torch.utils.data import DataLoader, IterableDataset

    name = type(rows).__name__
    if isinstance(rows, DataLoader):
        refuse_streams(rows.dataset)
        raise ConfigError(
            "dtf loads batches itself: give the data set of the DataLoader, dtf.map_style(loader.dataset, "
            "collate_fn=loader.collate_fn); step.batch_size and sampler say which rows are a batch"
        )
    if isinstance(rows, IterableDataset) or (hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__")):
        raise ConfigError(
            f"{name} is a stream: its samples have no numbers, so no rank could read its own, and no run could go on "
            f"in the middle; {REMEDY}"
        )
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        lacks = "__len__" if hasattr(rows, "__getitem__") else "__getitem__"
        raise ConfigError(f"{name} is no map-style data set: it has no {lacks}; define it, or {REMEDY}")


def _plain(value: Any) -> Any:
    """Mappings as dicts, arrays as tensors; all else as it is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inside) for key, inside in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if nest.is_named_tuple(value):
        return type(value)(*map(_plain, value))
    if type(value) in (list, tuple):
        plain = [_plain(inside) for inside in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value
