"""Whether a recipe's data are what the contract says, at the first look: the type of what its methods return."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from dtf.api.recipe import Dataset, Recipe
from dtf.api.sparse_table import inputs_of
from dtf.core import nest
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.data.map_style import refuse_streams


def opened(recipe: Recipe, split: str, seed: int) -> Dataset:
    """What `Recipe.open_data` returns. ConfigError for what is no data set, or has no length."""
    rows = recipe.open_data(split, seed)
    if not isinstance(rows, Dataset):
        remedy = ""
        if isinstance(rows, torch.utils.data.Dataset | torch.utils.data.DataLoader):
            refuse_streams(rows)
            remedy = ": return dtf.map_style(it), with its collate_fn"
        raise ConfigError(
            f"{type(recipe).__name__}.open_data({split!r}) returned {_kind(rows)}; it must return a dtf.Dataset{remedy}"
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
    who = _source(dataset)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        what = f"{len(answer)} values" if isinstance(answer, tuple | list) else _kind(answer)
        raise ConfigError(f"{who} returned {what}; it must return two values, inputs and targets")
    for part, value in zip(("inputs", "targets"), answer, strict=True):
        _check_form(who, part, value)
        if fault := next((text for bags in nest.bags_of(value) if (text := bags.fault(rows))), ""):
            raise ConfigError(
                f"{who} returned Bags among {part} with {fault}; each row has as many values as its lengths"
            )
        for name, leaf in nest.named(nest.map_leaves(lambda t: t, value, lambda bags: bags.lengths), part).items():
            _check_tensor(who, name, leaf, rows)
        nest.know_classes(value)


def refuse_loose_bags(dataset: Dataset, rows: Batch, recipe: Recipe) -> None:
    """Raise ConfigError for Bags among some rows that no sparse table pools, and for tables without an input."""
    looked_up = inputs_of(recipe.tables())
    if type(recipe).receive is not Recipe.receive:
        return  # it may make something else of them
    named = rows.inputs if isinstance(rows.inputs, dict) else {"inputs": rows.inputs}
    absent = next((name for name in looked_up if name not in named), None)
    if absent is not None:
        raise ConfigError(
            f"{type(recipe).__name__}.tables() has a table for inputs[{absent!r}], and {_source(dataset)} returned "
            f"{', '.join(map(repr, named))}; name one of these"
        )
    unpooled = [name for name, table in looked_up.items() if table.pooling is None and nest.bags_of(named[name])]
    if unpooled:
        raise ConfigError(
            f"{_source(dataset)} returned Bags as inputs[{unpooled[0]!r}], and their table does not say how rows of a "
            "bag are pooled; give it Table(pooling=Pooling.sum), mean or max"
        )
    places = [f"inputs[{name!r}]" for name, value in named.items() if name not in looked_up and nest.bags_of(value)]
    places += ["targets"] if nest.bags_of(rows.targets) else []
    if places:
        raise ConfigError(
            f"{_source(dataset)} returned Bags as {places[0]}, and no table of {type(recipe).__name__}.tables() has "
            "them; name the input in Table(inputs=...), or pad it"
        )


def varying_error(dataset: Dataset, first: list[Any], other: list[Any]) -> ConfigError:
    """The error for rows that have other shapes or formats in a later fetch, where nothing says so."""
    first, other = ([(tuple(shape), dtype) for shape, dtype in formats] for formats in (first, other))
    one, two = next(((a, b) for a, b in zip(first, other, strict=False) if a != b), (len(first), len(other)))
    return ConfigError(
        f"{_source(dataset)} returned rows of {one} and later of {two}; what a rank computes would depend on which "
        "rows it fetches together. Set shapes_vary=True there: each micro-batch is then fetched by itself"
    )


def refuse_varying(rows: Dataset, recipe: str, tables: bool, compiles: str) -> None:
    """Raise ConfigError for what rows of varying shapes cannot have: `tables`, or code that `compiles` for shapes."""
    if not rows.shapes_vary or not (tables or compiles):
        return
    why = (
        "the ids of sparse tables are looked up for several micro-batches at once"
        if tables
        else f"step.compile={compiles} makes code for shapes as they come, so that a run that goes on has other code"
    )
    raise ConfigError(
        f"recipe={recipe}: the shapes of {_source(rows)} vary (shapes_vary), and {why}; pad all rows to one length and "
        f"leave shapes_vary at False{'' if tables else ', or use step.compile=off'}"
    )


def _source(dataset: Dataset) -> str:
    """What makes a batch, for people."""
    while not hasattr(dataset, "batch_source") and hasattr(dataset, "wrapped"):
        dataset = dataset.wrapped  # type: ignore[attr-defined]
    return getattr(dataset, "batch_source", f"{type(dataset).__name__}.fetch()")


def _check_form(who: str, name: str, value: Any) -> None:
    """Raise ConfigError for what is no nest: something empty, keys that no message could tell, dicts of other kinds."""
    if isinstance(value, Tensor) or not isinstance(value, dict | list | tuple):
        return
    if not value:
        raise ConfigError(f"{who} returned an empty {type(value).__name__} as {name}; it must hold at least one tensor")
    if isinstance(value, dict):
        if type(value) not in (dict, OrderedDict):
            raise ConfigError(f"{who} returned {_kind(value)} as {name}; make it a plain dict")
        odd = next((key for key in value if not isinstance(key, str | int)), None)
        if odd is not None:
            raise ConfigError(f"{who} returned a dict with the key {odd!r} as {name}; keys must be texts or numbers")
    elif type(value) not in (list, tuple) and not nest.is_named_tuple(value):
        raise ConfigError(f"{who} returned {_kind(value)} as {name}; make it a plain list or tuple")
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        _check_form(who, f"{name}[{key!r}]", inside)


def _check_tensor(who: str, name: str, value: Any, rows: int) -> None:
    if not isinstance(value, Tensor):
        remedy = (
            "leave texts out, in __getitem__ or in the collate function"
            if isinstance(value, str)
            else "torch.from_numpy makes one of an array"
        )
        raise ConfigError(
            f"{who} returned {_kind(value)} as {name}; they must be a tensor, or a dict, list or tuple of tensors "
            f"({remedy})"
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
