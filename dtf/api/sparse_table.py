"""Sparse tables as a recipe declares them: rows of numbers by id, of which a step touches few. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from dtf.core.errors import ConfigError

NO_NUMBA = "sparse tables need numba, which is not installed: python -m pip install 'dtf[ctr]'"


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
    """Name of each input that holds ids -> the table they belong to. ConfigError for one that several tables name."""
    found: dict[str, Table] = {}
    for name, table in tables.items():
        for key in table.inputs or (name,):
            if key in found:
                raise ConfigError(
                    f"tables(): the ids of inputs[{key!r}] belong to two tables, of which {name} is one; name an input "
                    "in one table only"
                )
            found[key] = table
    return found


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
