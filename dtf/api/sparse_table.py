"""What a recipe says of a sparse table: rows of numbers by id, far more than any step touches. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NO_NUMBA = "sparse tables need numba, which is not installed: python -m pip install 'dtf[ctr]'"


@dataclass(frozen=True, slots=True)
class Table:
    """Lives beside the model, which gets rows in place of their ids: (B, F, width) floating for (B, F) int64. Id -1
    stands for zeros that learn nothing.

    A row is drawn from hash(seed, table, id) when it is first trained: normal, mean 0, standard deviation `scale`.
    """

    width: int
    size: int  # ids are 0 to size - 1; 0: any from 0 to 2**63 - 1
    capacity: int  # rows it may come to hold, over all ranks
    scale: float


class Placement(Enum):
    """Who holds a table's rows."""

    replicated = "replicated"  # every rank all of them
    rows = "rows"  # each rank those that a hash of their id gives it
    columns = "columns"  # each rank some columns of all rows
    tables = "tables"  # each rank whole tables
