"""`strategy.tables=auto`: how each sparse table is best sharded, from the ids of a few global batches and the sizes of
tables. Knows no rank: where it runs, and who is told, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dtf.api.row_optimizer import RowOptimizer
from dtf.api.sparse_table import Placement, Table
from dtf.api.strategy import column_objection
from dtf.core import nest
from dtf.core.text import bytes_text
from dtf.sparse.table_inputs import TableInputs
from dtf.sparse.table_layouts import owner_of

MESSAGE_BYTES = 16 << 10
"""Bytes that travel in the time that a message takes to begin."""

INDEX_BYTES = 64
"""Of a row in the index, at most."""

ROUNDS = 3
"""Exchanges of a step: ids, rows, gradients."""


class TableUse(NamedTuple):
    """What a step asks of a table: means over global batches."""

    shown: float  # ids that stand in the global batch, -1 left out
    distinct: float  # distinct ones of the rank that has most
    busiest: (
        float  # distinct ones that the busiest owner of a row-wise table is asked for, over those of the mean owner
    )


class TablePlan(NamedTuple):
    """How one table is sharded, and why, for people."""

    placement: Placement
    reason: str


def measure(
    batches: Iterable[Mapping[str, Any]], tables: Mapping[str, Table], rule: RowOptimizer, ranks: int
) -> dict[str, TableUse]:
    """How the tables are used by the inputs of a few global batches, whose rows `ranks` ranks divide evenly."""
    found: dict[str, list[TableUse]] = {name: [] for name in tables}
    for inputs in batches:
        rows = nest.count(inputs)
        bounds = [rows * rank // ranks for rank in range(ranks + 1)]
        parts = [nest.rows(inputs, bounds[rank], bounds[rank + 1]) for rank in range(ranks)]
        for name, table in tables.items():
            asked = [TableInputs(part, table.inputs or (name,), table.pooling) for part in parts]
            distinct = [each.distinct[each.distinct != -1] for each in asked]
            owners = np.bincount(owner_of(np.concatenate(distinct), ranks, rule.shards(table)), minlength=ranks)
            shown = sum(each.real for each in asked)
            busiest = owners.max() * ranks / max(1, owners.sum())
            found[name].append(TableUse(shown, max(map(len, distinct)), max(1.0, busiest)))
    return {name: TableUse(*np.mean(uses, axis=0).tolist()) for name, uses in found.items()}


def plan_tables(
    tables: Mapping[str, Table],
    rule: RowOptimizer,
    uses: Mapping[str, TableUse],
    ranks: int,
    item: int,
    room: int | None,
) -> dict[str, TablePlan]:
    """The placement of each table: that of the fewest bytes a step and rank, of those that fit.

    `item`: bytes of a number. `room`: bytes that a rank may take for tables that it holds whole; None: not known. The
    formulas are those of `table_layouts`. A message counts as MESSAGE_BYTES. Whole tables are for those that are so
    small among others that no rank has more than its share of the bytes.
    """
    costs = {name: _costs(name, table, rule, uses[name], ranks, item) for name, table in tables.items()}
    sizes = {name: _size(table, rule, item) for name, table in tables.items()}
    by_rows = {name: costs[name][Placement.row_wise] for name in tables}
    plans, taken = {}, 0
    for name in sorted(tables, key=lambda name: (sizes[name], name)):
        allowed = costs[name]
        if by_rows[name] * ranks > sum(by_rows.values()):
            del allowed[Placement.table_wise]
        too_large = room is not None and taken + sizes[name] > room
        if too_large:
            del allowed[Placement.replicated]
        chosen = min(allowed, key=lambda placement: allowed[placement])  # of equal ones the first
        if chosen is Placement.replicated:
            taken += sizes[name]
        plans[name] = TablePlan(chosen, _reason(chosen, allowed, uses[name], sizes[name] if too_large else 0))
    return {name: plans[name] for name in tables}


def _costs(name: str, table: Table, rule: RowOptimizer, use: TableUse, ranks: int, item: int) -> dict[Placement, float]:
    """Bytes that a rank sends in a step, with those that its messages count as; of the busiest rank for row-wise."""
    ids, columns, others = use.distinct, table.width + 2 * rule.lives, ranks - 1
    share = others / ranks
    exchanged = ids * (8 + 2 * table.width * item)
    gathered = others * ids * (8 + columns * item)
    if table.size:
        gathered = min(gathered, 2 * share * table.size * (columns + 1) * item)
    costs = {
        Placement.replicated: gathered + 2 * others * MESSAGE_BYTES,
        Placement.table_wise: share * exchanged + ROUNDS * share * MESSAGE_BYTES,
        Placement.row_wise: share * exchanged * use.busiest + ROUNDS * others * MESSAGE_BYTES,
    }
    if not column_objection(name, table.width, ranks, rule):
        costs[Placement.column_wise] = (
            others * ids * 8 + share * ids * 2 * table.width * item + ROUNDS * others * MESSAGE_BYTES
        )
    return costs


def _size(table: Table, rule: RowOptimizer, item: int) -> int:
    """Bytes of all rows that a table may hold, with their state and index."""
    numbers = table.width + sum(count for count, _ in rule.states(table.width).values())
    return table.most_rows * (numbers * item + INDEX_BYTES)


def _reason(chosen: Placement, costs: Mapping[Placement, float], use: TableUse, too_large: int) -> str:
    """`458 kB a rank and step (replicated 463 kB), 5,982 distinct of 59,332 ids`."""
    others = sorted((cost, placement.value) for placement, cost in costs.items() if placement is not chosen)
    texts = [f"{name} {bytes_text(round(cost))}" for cost, name in others[:1]]
    texts += [f"replicated would take {bytes_text(too_large)}"] if too_large else []
    beside = f" ({', '.join(texts)})" if texts else ""
    return (
        f"{bytes_text(round(costs[chosen]))} a rank and step{beside}, "
        f"{use.distinct:,.0f} distinct ids a rank of {use.shown:,.0f} in a batch"
    )
