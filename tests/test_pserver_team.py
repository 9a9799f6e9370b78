"""Laws of trainers that are several processes (`strategy.team`): the numbers are those of one process, in every mode that has any."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.harness import difference, reference, spread
from tests.test_tables import ANY

slow = pytest.mark.slow
TOY: dict[str, Any] = {"rows": 100}
RECIPES = pytest.mark.parametrize("recipe", [TOY, ANY], ids=["toy", "tabled"])


@RECIPES
@pytest.mark.parametrize(
    ("team", "processes", "servers"),
    [(2, 2, 1), pytest.param(2, 4, 2, marks=slow), pytest.param(3, 3, 2, marks=slow), (4, 8, 2), pytest.param(7, 7, 1, marks=slow)],
)
def test_sync_is_the_reference(team: int, processes: int, servers: int, recipe: dict[str, Any]) -> None:
    """Two teams of four share five micro-batches: some have none."""
    options = {"team": team, "servers": servers, "min_block": 1}
    assert difference(reference(recipe=recipe), spread("pserver", processes, options=options, recipe=recipe)) <= 1e-10


@RECIPES
def test_modes_that_wait_for_everybody_are_the_reference_too(recipe: dict[str, Any]) -> None:
    alone = spread("pserver", 2, options={"mode": "async", "staleness": 0, "team": 2}, recipe=recipe)
    assert difference(reference(recipe=recipe), alone) <= 1e-10
    gathered = spread("pserver", 4, options={"mode": "half_async", "staleness": 0, "team": 2}, recipe=recipe)
    for run in (gathered, whole := {**reference(recipe=recipe)}):
        run["ids"] = {step: sorted(ids) for step, ids in run["ids"].items()}
    assert difference(whole, gathered) <= 1e-10


@RECIPES
def test_geo_is_what_it_is_with_trainers_of_one_process(recipe: dict[str, Any]) -> None:
    options = {"mode": "geo", "geo_steps": 3, "staleness": 0, "servers": 2, "min_block": 1}
    one, team = spread("pserver", 1, options=options, recipe=recipe), spread("pserver", 3, options=options | {"team": 3}, recipe=recipe)
    for run in (one, team):
        run["train"] = {}  # measured at every step, and told at every third
    assert difference(one, team) <= 1e-10


@pytest.mark.parametrize("mode", ["async", pytest.param("half_async", marks=slow), pytest.param("geo", marks=slow)])
def test_two_teams_take_every_sample_once_and_count_evaluations_exactly(mode: str) -> None:
    """The engine refuses an evaluation that counts a row twice or not at all."""
    found = spread("pserver", 4, options={"mode": mode, "servers": 2, "min_block": 1, "team": 2}, recipe=ANY, steps=10, clip_norm=0.0, eval_every=1)
    for epoch in range(2):
        assert Counter(i for step in range(5 * epoch, 5 * epoch + 5) for i in found["ids"][str(step)]) == Counter(range(100))
    assert len(found["eval"]) == 10 and found["eval"]["10"]["loss"] < found["eval"]["1"]["loss"]
