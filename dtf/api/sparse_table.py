"""Sparse tables as a recipe declares them: rows of numbers by id, of which a step touches few. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

NO_NUMBA = "sparse tables need numba, which is not installed: python -m pip install 'dtf[ctr]'"


@dataclass(frozen=True, slots=True)
class Table:
    """The declaration of a sparse table, see `Recipe.tables`.

    A table lies beside the model, in host memory. The model gets the rows (B, F, width), floating, in place of the ids
    (B, F) int64. Id -1 stands for zeros that learn nothing.

    An id is any 64-bit integer but -1, so hashes of 64 bits are used as they are; of a range (`size`), those in it. A
    range costs what its rows cost, however large it is: a slot for each id is kept only where all slots take no more
    memory than the index by hash of `capacity` rows.

    A row is drawn from hash(seed, table, id) when it is first trained: normal, mean 0, standard deviation `scale`.
    """

    width: int  # numbers in a row
    size: int  # ids are 0 to size - 1; 0: any but -1
    capacity: int  # the most rows that all ranks together may hold
    scale: float  # standard deviation of a new row

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

    # Other names of the same members.
    rows = "rows"  # noqa: PIE796
    columns = "columns"  # noqa: PIE796
    tables = "tables"  # noqa: PIE796
