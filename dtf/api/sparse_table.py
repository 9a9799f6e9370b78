"""Sparse tables as a recipe declares them: rows of numbers by id, of which a step touches few. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, Protocol

from dtf.core.errors import ConfigError

NO_NUMBA = "sparse tables need numba, which is not installed: python -m pip install 'dtf[ctr]'"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


class Pooling(Enum):
    """What the rows of a bag become, by the names of torch's EmbeddingBag. An empty bag becomes zeros."""

    sum = "sum"
    mean = "mean"  # over the ids that are there
    max = "max"  # of each column by itself; the gradient goes to the row that has it, of equal ones the first


@dataclass(frozen=True, slots=True)
class Table:
    """The declaration of a sparse table, see `Recipe.tables`.

    A table lies beside the model, in host memory. The model gets the rows (B, F, width), floating, in place of the ids
    (B, F) int64, and pooled rows (B, width) or (B, F, width) in place of `dtf.Bags`. Id -1 stands for zeros that learn
    nothing; in a bag it counts for nothing.

    An id is any 64-bit integer but -1, so hashes of 64 bits are used as they are; of a range (`size`), those in it. A
    range costs what its rows cost, however large it is: a slot for each id is kept only where all slots take no more
    memory than the index by hash of `capacity` rows.

    A row is drawn from hash(seed, table, id) when it is first trained: normal, mean 0, standard deviation `scale`.
    """

    width: int  # numbers in a row
    size: int  # ids are 0 to size - 1; 0: any but -1
    capacity: int  # the most rows that all ranks together may hold
    scale: float  # standard deviation of a new row
    inputs: tuple[str, ...] = ()  # those that hold its ids; empty: the one of the table's name
    pooling: Pooling | None = None  # of rows of Bags; None: no input is Bags
    capacity_key: str = "capacity"  # the config key that sets it, for errors

    @property
    def most_rows(self) -> int:
        """The most rows that can exist."""
        return min(self.capacity, self.size) if self.size else self.capacity


class KeepsChanges(Protocol):
    """Sparse tables that can save the rows alone that changed."""

    def keep_changes(self, layer: int) -> None:
        """The next state holds all rows (layer 0), or those that changed since the state before (layer 1 and more), see
        `Box.layer`. From the first call on changes are kept track of. Not collective.
        """
        ...


def inputs_of(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Name of each input that holds ids -> the table they belong to, of what `Recipe.tables` returned. ConfigError for
    what declares no tables, and for an input that several tables name.
    """
    if not isinstance(tables, Mapping):
        kind = type(tables).__name__
        raise ConfigError(f"tables() returned {kind}; it must return a dict of the tables by name, {{}} for none")
    found: dict[str, Table] = {}
    for name, table in tables.items():
        if fault := name_fault(name):
            raise ConfigError(f"tables(): table {name!r} {fault}; Table(inputs=...) has the names of inputs")
        if fault := _fault(table):
            raise ConfigError(f"tables(): table {name} {fault}")
        for key in table.inputs or (name,):
            if key in found:
                raise ConfigError(
                    f"tables(): the ids of inputs[{key!r}] belong to two tables, of which {name} is one; name an input "
                    "in one table only"
                )
            found[key] = table
    return found


def name_fault(name: object) -> str:
    """What keeps a table from having this name, which stands in names of files and tensors; empty: nothing."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return ""
    return "needs another name: 1 to 100 letters (a to z), digits, _, - and ., and no . first"


def _fault(table: Any) -> str:
    """What keeps a declaration from being one; empty: nothing."""
    if not isinstance(table, Table):
        return f"is {type(table).__name__}; it must be a dtf.Table"
    for key, least in {"width": 1, "size": 0, "capacity": 1}.items():
        value = getattr(table, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            return f"has {key}={value!r}; it must be an int of {least} or more"
    if not isinstance(table.scale, Real) or not 0 <= table.scale < math.inf:
        return f"has scale={table.scale!r}; it must be a number of 0 or more"
    if not isinstance(table.inputs, tuple | list) or not all(isinstance(key, str | int) for key in table.inputs):
        return f"has inputs={table.inputs!r}; it must be a tuple of names of inputs"
    if not isinstance(table.pooling, Pooling | None):
        return f"has pooling={table.pooling!r}; it must be Pooling.sum, Pooling.mean, Pooling.max or None"
    return ""


class Placement(Enum):
    """Which rank holds which part of a sparse table. row_wise, column_wise and table_wise are TorchRec's names;
    its name for `replicated` is data_parallel.

    A config may use a member's name or its value (`row_wise` or `rows`). A resolved config holds the value, so that
    configs of earlier runs stay what they are and both spellings mean the same run.
    """

    replicated = "replicated"  # every rank holds all rows
    row_wise = "rows"  # each rank holds the rows whose ids a hash assigns to it
    column_wise = "columns"  # each rank holds some columns of all rows
    table_wise = "tables"  # each rank holds whole tables
    auto = "auto"  # for each table one of these, by the ids of the training data, see `Task.placements`

    # Other names of the same members.
    rows = "rows"  # noqa: PIE796
    columns = "columns"  # noqa: PIE796
    tables = "tables"  # noqa: PIE796


Placements = Placement | dict[str, Placement]
"""Of all tables alike, or of each by its name."""


def placement_of(placements: Placements, name: str) -> Placement:
    """That of one table."""
    return placements[name] if isinstance(placements, dict) else placements
