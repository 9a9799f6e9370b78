"""The rows of a recipe of transformers: the splits that a function returns, and batches as the model takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dtf.api.recipe import Dataset
from dtf.core.errors import ConfigError
from dtf.data.map_style import MapStyle

_LABELS = ("labels", "label", "label_ids")  # columns that a collator makes the labels of
_EVALUATED = ("eval", "validation", "val", "dev", "test")
_FORMS = "rows to train on and rows to evaluate on, as a pair or as a dict of train, validation and, if you like, test"


def items_of(rows: Any, made_by: Any) -> Any:
    """The rows one by one, of a map-style data set or of what dtf makes of files. ConfigError for others of dtf's."""
    if isinstance(rows, MapStyle) and rows.is_plain:
        return rows.items
    if isinstance(rows, Dataset):
        given = " with a collate function or a target" if isinstance(rows, MapStyle) else ""
        raise ConfigError(
            f"{made_by} returned a {type(rows).__name__} of dtf{given}, which makes batches itself; here the collator "
            "makes them, of rows that are dicts, such as those of dtf.parquet_rows(FILES)"
        )
    return rows


def splits_of(found: Any, made_by: Any) -> dict[str, Any]:
    """Rows by split, `train`, `eval` and perhaps `test`. ConfigError for what is none of the forms."""
    if isinstance(found, Mapping):
        evaluated = next((name for name in _EVALUATED if name in found), None)
        if "train" in found and evaluated is not None:
            named = {"train": found["train"], "eval": found[evaluated]}
            return named | ({"test": found["test"]} if evaluated != "test" and "test" in found else {})
        raise ConfigError(f"{made_by} returned a dict of {', '.join(map(str, found))}; it must return {_FORMS}")
    if isinstance(found, list | tuple) and len(found) == 2 and not any(isinstance(part, Mapping) for part in found):
        return dict(zip(("train", "eval"), found, strict=True))
    raise ConfigError(f"{made_by} returned {type(found).__name__}; it must return {_FORMS}")


class ForModel:
    """A collator whose rows are left without the columns that a model does not take, as transformers' Trainer does, and
    whose batches have labels and nothing that the model does not take. `model`: its class.
    """

    def __init__(self, collate: Any, model: type) -> None:
        self._who = getattr(collate, "__name__", type(collate).__name__)
        if not callable(collate):
            raise ConfigError(
                f"the function of the collator returned {self._who}; it must return a function of a list of rows, such "
                "as a DataCollatorWithPadding"
            )
        self._collate: Callable[[list[Any]], Any] = collate
        self.follow(model)

    def follow(self, model: Any) -> None:
        """Make batches for this class of models."""
        self._model, self._inputs = model.__name__, {*inspect.signature(model.forward).parameters}
        self._columns = {*self._inputs, *_LABELS}

    def _taken(self, row: Any) -> Any:
        """The columns that the model takes."""
        if not isinstance(row, Mapping):
            return row
        taken = {name: value for name, value in row.items() if name in self._columns}
        if not self._inputs.intersection(taken):
            raise ConfigError(
                f"{self._model}.forward names none of the columns of a row, {', '.join(map(str, row))}; its arguments "
                f"are {', '.join(sorted(self._inputs - {'self'}))}"
            )
        return taken

    def __call__(self, rows: list[Any]) -> Any:
        batch = self._collate([self._taken(row) for row in rows])
        names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        if not isinstance(batch, Mapping) or "labels" not in batch:
            raise ConfigError(
                f"{self._who} makes a batch of {names}, without labels; give rows a column label or labels (of "
                "language models, DataCollatorForLanguageModeling makes them)"
            )
        unknown = next((name for name in batch if name not in self._inputs and name != "labels"), None)
        if unknown is not None:
            raise ConfigError(f"{self._who} gives {unknown}, which {self._model}.forward does not take; leave it out")
        return batch
