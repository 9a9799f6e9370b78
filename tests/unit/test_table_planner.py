"""The plan of `strategy.tables=auto`: what is measured of batches, and what follows from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.sparse_table import Placement, Pooling, Table
from dtf.core.nest import Bags
from dtf.sparse.row_optimizers import RowAdagrad, RowSgd, RowwiseAdagrad
from dtf.sparse.table_layouts import owner_of
from dtf.sparse.table_planner import MESSAGE_BYTES, TableUse, measure, plan_tables

ANY = Table(16, 0, 1_000_000, 0.1)


def plan(
    tables: dict[str, Table], uses: dict[str, TableUse], ranks: int = 4, room: int | None = None, rule: Any = None
) -> dict[str, str]:
    found = plan_tables(tables, rule or RowAdagrad(), uses, ranks, 4, room)
    return {name: each.placement.value for name, each in found.items()}


def test_ids_are_counted_by_rank_and_owner() -> None:
    """Four rows on two ranks: the first has ids 1, 2 and 3, in two inputs, one of bags; the second 1 alone."""
    inputs = {
        "item": torch.tensor([[1], [2], [1], [-1]]),
        "tags": Bags(torch.tensor([1, 3, 1, 1]), torch.tensor([2, 0, 1, 1])),
    }
    table = Table(2, 0, 1000, 0.1, ("item", "tags"), Pooling.sum)
    use = measure([inputs, inputs], {"items": table}, RowSgd(), 2)["items"]
    asked = np.bincount(owner_of(np.array([1, 2, 3, 1]), 2), minlength=2)
    assert use == TableUse(7, 3, asked.max() / 2)


def test_each_placement_is_chosen_where_it_sends_least() -> None:
    few, many = TableUse(4096, 20, 1.0), TableUse(4096, 4000, 1.05)
    assert plan({"a": ANY}, {"a": many}) == {"a": "rows"}
    assert plan({"a": ANY}, {"a": few}) == {"a": "replicated"}  # fewer messages
    small = Table(16, 100, 100, 0.1)
    assert plan({"a": small}, {"a": TableUse(4096, 100, 1.2)}) == {"a": "replicated"}
    # one owner has most of what is asked for, and rows are wide
    wide = Table(512, 0, 1_000_000, 0.1)
    assert plan({"a": wide}, {"a": TableUse(4096, 500, 1.3)}) == {"a": "columns"}
    assert plan({"a": wide}, {"a": TableUse(4096, 500, 1.3)}, rule=RowwiseAdagrad()) == {"a": "rows"}
    # beside a large one, small ones need not be spread: whole tables take fewer messages
    uses = {"large": many, "a": few, "b": few}
    assert plan(dict.fromkeys(uses, ANY), uses) == {"large": "rows", "a": "tables", "b": "tables"}


def test_what_no_rank_has_room_for_is_divided() -> None:
    few = TableUse(4096, 20, 1.0)
    tables = {"a": ANY, "b": Table(16, 0, 10, 0.1)}
    size = 1_000_000 * (32 * 4 + 64)
    assert plan(tables, dict.fromkeys(tables, few), 2) == dict.fromkeys(tables, "tables")
    one = {"a": ANY}
    assert plan(one, {"a": few}, room=size) == {"a": "replicated"}
    found = plan_tables(one, RowAdagrad(), {"a": few}, 4, 4, size - 1)["a"]
    assert found.placement is Placement.row_wise and "replicated would take 192 MB" in found.reason


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_plan_depends_on_what_it_is_given_alone(ranks: int) -> None:
    draw = np.random.default_rng(0)
    tables = {f"t{i}": Table(int(draw.integers(1, 64)), 0, 1000 * i + 9, 0.1) for i in range(20)}
    uses = {name: TableUse(5000, float(draw.integers(1, 5000)), 1.1) for name in tables}
    backwards = dict(reversed(tables.items()))
    assert plan(tables, uses, ranks) == plan(backwards, uses, ranks) and MESSAGE_BYTES > 0
