"""Whether a recipe's data are what the contract says, at the first look: the type of what its methods return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtf.api.recipe import Dataset, Recipe
from dtf.core.errors import ConfigError


def opened(recipe: Recipe, split: str, seed: int) -> Dataset:
    """What `Recipe.open_data` returns. ConfigError for what is no data set, or has no length."""
    rows = recipe.open_data(split, seed)
    if not isinstance(rows, Dataset):
        raise ConfigError(
            f"{type(recipe).__name__}.open_data({split!r}) returned {_kind(rows)}; it must return a dtf.Dataset"
        )
    try:
        len(rows)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{type(rows).__name__}.__len__() gives no number of rows ({error}); it must return an int from 0 on"
        ) from error
    return rows


def check_fetched(dataset: Dataset, rows: int, answer: Any) -> None:
    """Raise ConfigError unless `answer` is what `Dataset.fetch` must return for so many rows."""
    who = f"{type(getattr(dataset, 'wrapped', dataset)).__name__}.fetch()"
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        what = f"{len(answer)} values" if isinstance(answer, tuple | list) else _kind(answer)
        raise ConfigError(f"{who} returned {what}; it must return two values, inputs and targets")
    inputs, targets = answer
    parts = {"inputs": inputs}
    if isinstance(inputs, dict):
        parts = {f"inputs[{name!r}]": value for name, value in inputs.items()}
        if not parts:
            raise ConfigError(f"{who} returned an empty dict of inputs; it must hold a tensor for each input")
    for name, value in (parts | {"targets": targets}).items():
        if not isinstance(value, Tensor):
            also = " or a dict of tensors" if name == "inputs" else ""
            raise ConfigError(
                f"{who} returned {_kind(value)} as {name}; they must be a tensor{also} (torch.from_numpy makes one of "
                "an array)"
            )
        if value.layout is not torch.strided or value.is_nested:
            form = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            raise ConfigError(f"{who} returned {name} that are {form}; they must be dense (to_dense, pad_sequence)")
        if not value.dim() or len(value) != rows:
            raise ConfigError(
                f"{who} returned {name} of shape {tuple(value.shape)} for {rows} ids; the first axis must be the rows"
            )
        if value.device.type != "cpu":
            raise ConfigError(f"{who} returned {name} on {value.device}; they must be on CPU, the strategy moves them")


def _kind(value: Any) -> str:
    return (
        "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    )
