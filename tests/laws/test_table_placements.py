"""Laws of the placements of sparse tables: the same numbers wherever rows lie, and where each table lies otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.laws.test_sharded_tables import ANY, KINDS
from tests.support.harness import difference, reference, spread

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "tables", ["rows", *(pytest.param(name, marks=slow) for name in ("columns", "replicated", "tables"))]
)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=slow), "tensor", pytest.param("pipeline", marks=slow)])
def test_wherever_the_rows_lie(strategy: str, tables: str) -> None:
    """Width 2 of the second table: two ranks have a column each."""
    assert difference(reference(recipe=ANY), spread(strategy, 2, options={"tables": tables}, recipe=ANY)) <= 1e-10


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("tensor", marks=slow), pytest.param("pipeline", marks=slow)])
@pytest.mark.parametrize("others", ["rows", pytest.param("columns", marks=slow), pytest.param("tables", marks=slow)])
def test_tables_side_by_side_lie_each_in_another_way(strategy: str, others: str, tmp_path: Path) -> None:
    """As a plan says. The norm of the gradient, by which it is clipped, counts each once. A save goes on without it."""
    case: dict[str, Any] = {"recipe": KINDS["bags"], "clip_norm": 0.3}
    placements = {"ids": others, "who": "replicated", "words": "columns"}
    found = spread(
        strategy, 2, options={"tables": "auto"}, placements=placements, folder=str(tmp_path), save_every=2, **case
    )
    assert difference(reference(**case), found) <= 1e-10
    again = spread("fsdp", 2, start=str(tmp_path / "step_000002"), options={"tables": "auto"}, **case)["tensors"]
    assert difference(found, found | {"tensors": again}) <= 1e-10
