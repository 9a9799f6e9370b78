"""Laws of the parameter server on a bad network: requests and answers that are lost, doubled, late and out of order."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.harness import spread
from tests.test_tables import ANY

slow = pytest.mark.slow
SEEDS = [pytest.param(seed, marks=slow if seed else ()) for seed in range(8)]
MISDEEDS = {"lose_request", "lose_response", "double", "late"}


@cache
def calm(servers: int) -> dict[str, Any]:
    return spread("pserver", 3, recipe=ANY, options={"servers": servers, "min_block": 1})


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("train", "eval", "ids", "tensors"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [1, 2])
def test_sync_ends_bit_for_bit_although_trainers_die(servers: int, seed: int) -> None:
    """Between any two requests, as between pushes of one lease to two servers; each is started again at once, twice at most."""
    found = spread("pserver", 3, recipe=ANY, options={"servers": servers, "min_block": 1}, deaths=seed)
    assert same(found, calm(servers)) and found["died"] >= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "half_async", "gather": 2}, {"mode": "geo", "geo_steps": 2}], ids=lambda mode: mode["mode"])
def test_each_ticket_is_applied_once_although_trainers_die(mode: dict[str, Any], servers: int, seed: int) -> None:
    found = spread("pserver", 3, options=mode | {"servers": servers, "min_block": 1}, deaths=seed, clip_norm=0.0, steps=10)
    assert Counter(i for step in found["ids"].values() for i in step) == Counter(dict.fromkeys(range(100), 2)), "two epochs"
    assert found["died"] >= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [1, 2])
def test_sync_ends_bit_for_bit_as_on_a_good_network(servers: int, seed: int) -> None:
    found = spread("pserver", 3, recipe=ANY, options={"servers": servers, "min_block": 1}, network=seed)
    assert same(found, calm(servers))
    met = found["met"]
    assert met.keys() >= (MISDEEDS if servers > 1 else MISDEEDS - {"late"})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "half_async", "gather": 2}], ids=lambda mode: mode["mode"])
def test_each_ticket_is_applied_once(mode: dict[str, Any], servers: int, seed: int) -> None:
    """Also where two servers get the pushes in different orders, one of them before it has opened the step."""
    found = spread("pserver", 3, options=mode | {"servers": servers, "min_block": 1}, network=seed, clip_norm=0.0, steps=10)
    for epoch in range(2):
        assert Counter(i for step in range(5 * epoch, 5 * epoch + 5) for i in found["ids"][str(step)]) == Counter(range(100))
    assert found["met"].keys() & MISDEEDS
