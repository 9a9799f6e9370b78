"""What `Recipe.tables` returns, and what a batch has for a table: anything else is refused by name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtf.api.sparse_table import Pooling, Table
from dtf.config.settings import Settings
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.recipes.ctr.recipe import GeneratedClicks
from dtf.sparse.table_inputs import TableInputs
from tests.support.sparse_toy import Tabled


def table(**values: Any) -> Any:
    return Table(**{"width": 4, "size": 0, "capacity": 9, "scale": 0.1} | values)


def widths(tables: Any) -> dict[str, int]:
    class Declares(Tabled):
        def tables(self) -> dict[str, Table]:
            return tables

    return Declares().table_widths()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([table()], "returned list; it must return a dict"),
        (None, "returned NoneType; it must return a dict"),
        ({"ids": (4, 0, 9, 0.1)}, "table ids is tuple; it must be a dtf.Table"),
        *(({"ids": table(width=width)}, f"width={width!r}; it must be an int of 1") for width in (0, -2, 4.0, True)),
        *(({"ids": table(capacity=most)}, f"capacity={most!r}; it must be an int of 1") for most in (0, -5, 1e3)),
        ({"ids": table(size=-3)}, "size=-3; it must be an int of 0 or more"),
        *(({"ids": table(scale=scale)}, f"scale={scale!r}; it must be") for scale in (-0.1, math.nan, math.inf, "1")),
        ({"ids": table(inputs="ids")}, "inputs='ids'; it must be a tuple of names"),
        ({"ids": table(pooling="mean")}, "pooling='mean'; it must be Pooling.sum, Pooling.mean, Pooling.max or None"),
        *(
            ({name: table()}, f"table {name!r} needs another name: 1 to 100 letters")
            for name in ("", "a b", "a/b", "a\n", "a\0", "ä", ".a", "a" * 101, 7)
        ),
    ],
)
def test_what_declares_no_tables_is_refused(tables: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        widths(tables)
    assert str(error.value).startswith("tables()") and words in str(error.value)


def test_what_declares_tables_is_taken() -> None:
    names = "a", "A-b_c.d", "_", "-", "7", "a" * 100
    assert widths({name: table(scale=np.float32(1), pooling=Pooling.max, inputs=[name]) for name in names}) == (
        dict.fromkeys(names, 4)
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.cfloat, torch.uint64])
def test_ids_that_are_no_integers_are_refused(kind: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"inputs\['user'\] are {kind}, and ids .* convert them with .long\(\)"):
        TableInputs({"user": torch.ones(2, 3).to(kind)}, ["user"], None)


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"])
def test_integers_are_ids(kind: str) -> None:
    ids = torch.tensor([[7, 3], [3, 100]])
    assert TableInputs({"user": ids.to(getattr(torch, kind))}, ["user"], None).distinct.tolist() == [7, 3, 100]


def seen(clicked: Any) -> list[float]:
    """The clicks of three rows, of which the last is padding."""

    def clicks(_: Tensor) -> Any:
        return clicked

    ids = {"user": torch.tensor([[1], [2], [3]])}
    batch = Batch(ids, torch.zeros(3), torch.tensor([1.0, 1, 0]), np.arange(3))
    return TableInputs(ids, ["user"], None).seen(batch, clicks)[:, 1].tolist()


def test_clicks_are_numbers_that_are_not_0() -> None:
    assert seen(None) == [0, 0, 0]
    for clicked in ([0.5, -1.0, 1.0], [1, 1, 1], [True, True, True]):
        assert seen(torch.tensor(clicked)) == [1, 1, 0]
    assert seen(torch.tensor([math.nan, math.inf, 1])) == [0, 1, 0], "NaN is no click"


@pytest.mark.parametrize(
    ("clicked", "what"),
    [
        ([True, False, True], "list"),
        (torch.ones(3, 1), r"a tensor \(3, 1\)"),
        (torch.ones(1), r"a tensor \(1,\)"),
        (np.ones(3), "ndarray"),
    ],
)
def test_clicks_of_another_form_are_refused(clicked: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"clicks\(\) returned {what} for 3 rows; it must return a tensor \(3,\)"):
        seen(clicked)


def test_widths_and_fields_of_other_names_are_refused_before_ranks_start() -> None:
    class Fields(GeneratedClicks):
        _inputs = ("site", "user id")  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="'user id' needs another name: .*; rename the column"):
        Fields()._check_fields()

    class Reads(Tabled):
        def table_widths(self) -> dict[str, int]:
            return {"user id": 4}

    with pytest.raises(ConfigError, match=r"table_widths\(\): table 'user id' needs another name"):
        Settings.check_tables(SimpleNamespace(recipe=Reads()), True)  # type: ignore[arg-type]
