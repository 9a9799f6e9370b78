"""Laws of `strategy.dense=allreduce`: trainers hold the dense parameters, servers the rows; the numbers are those of ddp."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import difference, reference, spread
from tests.test_tables import ANY, RANGE

slow = pytest.mark.slow
TWO: dict[str, Any] = {"dense": "allreduce", "servers": 2}


@pytest.mark.parametrize("recipe", [ANY, pytest.param(RANGE, marks=slow)], ids=["any", "range"])
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=slow), 3])
def test_the_numbers_are_the_references_in_fp64(processes: int, servers: int, recipe: dict[str, Any]) -> None:
    found = spread("pserver", processes, options={"dense": "allreduce", "servers": servers}, recipe=recipe)
    assert difference(reference(recipe=recipe), found) <= 1e-10
