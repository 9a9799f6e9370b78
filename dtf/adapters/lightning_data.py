"""The rows of a DataLoader, by number: its data set and its collate function, without its order."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from dtf.api.recipe import Dataset
from dtf.core.errors import ConfigError
from dtf.data.row_draws import Positions, drawn_batch
from dtf.model.receive import Receiver

_LABELS = ("labels", "label", "targets", "target", "y")


class LoaderRows(Dataset):
    """The rows of a map-style data set as its loader makes batches of them. `name`: of the loader, for messages.
    `shapes_vary`: see `Dataset.shapes_vary`; None: True where the loader has a collate function of its own.

    What a row draws from the generators of torch, Python and numpy is a function of the seed, the epoch and its number;
    what the collate function draws, of the numbers of its rows.
    """

    prefetch = 0  # the generators are those of the whole process

    def __init__(self, loader: DataLoader, name: str, seed: int, shapes_vary: bool | None = None) -> None:
        self.name, self._seed = name, seed
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.shuffles = _shuffles(loader, name)
        self._rows: Any = loader.dataset
        self._collate: Callable[[list[Any]], Any] = loader.collate_fn
        self.shapes_vary = loader.collate_fn is not default_collate if shapes_vary is None else shapes_vary
        self._draws = False
        self.form: Any = None
        """How the tensors of a batch lie in it, see `batch_of`; known after the first fetch."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def batch_source(self) -> str:
        """What makes a batch, for messages."""
        return f"the collate_fn of {self.name} (of dtf.lightning_recipe)"

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        batch = self._batch(ids.tolist(), epoch)
        tensors: dict[str, Tensor] = {}
        self.form = _form(batch, "", tensors, self.name)
        return tensors, tensors[label_of(tensors)]

    def fingerprint(self) -> str:
        return f"{type(self._rows).__name__} {len(self)}"

    def _batch(self, numbers: list[int], epoch: int) -> Any:
        """The batch of these rows, under seeds where it draws."""
        if not self._draws:
            with Receiver.lock:
                before = Positions.now()
                batch = self._collate(self._items(numbers))
                if not before.moved():
                    return batch
                before.restore()
            self._draws = True
        keys = self._seed, epoch
        return drawn_batch(self._items, self._collate, numbers, keys, self.shapes_vary, self.batch_source)

    def _items(self, numbers: list[int]) -> list[Any]:
        many: Any = getattr(self._rows, "__getitems__", None)
        return list(many(numbers)) if many is not None else [self._item(number) for number in numbers]

    def _item(self, number: int) -> Any:
        """A frame of its own, in which an error finds the number of the row."""
        return self._rows[number]


def check_loader(loader: Any, name: str) -> DataLoader:
    """The loader, if it is one of map-style rows. ConfigError for others."""
    if isinstance(loader, Sequence | Mapping) or type(loader).__name__ == "CombinedLoader":
        raise ConfigError(f"{name} gives several loaders; give one, of a torch.utils.data.ConcatDataset")
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"{name} gives a {type(loader).__name__}; give a torch.utils.data.DataLoader")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ConfigError(
            f"{name}: {type(loader.dataset).__name__} gives rows in an order of its own, and each row must have a "
            "number that any rank can ask for; give a map-style data set, with __getitem__ and __len__"
        )
    return loader


def _shuffles(loader: DataLoader, name: str) -> bool:
    sampler = loader.sampler
    if loader.batch_size is None or type(loader.batch_sampler).__name__ != "BatchSampler":
        raise ConfigError(
            f"{name} chooses its batches by {type(loader.batch_sampler).__name__}; give it batch_size and shuffle, and "
            "choose among dtf's samplers: sampler=weighted, sampler=repeated"
        )
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return True
    if type(sampler) is not SequentialSampler:
        raise ConfigError(
            f"{name} has the sampler {type(sampler).__name__}; give it shuffle=True or False, and choose among dtf's "
            "samplers, such as sampler=weighted"
        )
    return False


# ------------------------------------------------------------ the form of a batch


def _form(value: Any, name: str, tensors: dict[str, Tensor], loader: str) -> Any:
    """The batch with names in place of its tensors, which go to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name or "batch"] = value
        return name or "batch"
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        items = {key: _form(each, f"{inner}{key}", tensors, loader) for key, each in value.items()}
        # a batch of a library that is a dict with methods is made anew of its items
        return types.MappingProxyType({"class": dict if type(value) is dict else type(value), "items": items})
    if isinstance(value, list | tuple):
        parts = [_form(each, f"{inner}{index}", tensors, loader) for index, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise ConfigError(
        f"{loader}: {name or 'a batch'} is a {type(value).__name__}; rows of a batch are divided, so all that is in it "
        "must be tensors with an axis of rows: leave it out, or make it a tensor"
    )


def batch_of(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The batch that `LoaderRows` has taken apart."""
    if isinstance(form, str):
        return tensors[form]
    if isinstance(form, types.MappingProxyType):
        items = {key: batch_of(each, tensors) for key, each in form["items"].items()}
        return items if form["class"] is dict else form["class"](items)
    parts = [batch_of(each, tensors) for each in form]
    return type(form)(*parts) if hasattr(form, "_fields") else type(form)(parts)


def label_of(tensors: Mapping[str, Tensor]) -> str:
    """The name of what rows are to be predicted as: by its name, else the last."""
    return next((name for name in tensors if name.rpartition(".")[2].lower() in _LABELS), list(tensors)[-1])
