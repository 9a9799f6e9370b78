"""Laws of the parameter server on a bad network: requests and answers that are lost, doubled, late and out of order."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.laws.test_sharded_tables import ANY
from tests.support.harness import BATCH, spread
from tests.support.ranks import ranks

slow = pytest.mark.slow
SEEDS = [pytest.param(seed, marks=slow if seed else ()) for seed in range(8)]
LONG: dict[str, Any] = {"steps": 10, "recipe": {"rows": 4 * BATCH + 4}, "clip_norm": 0.0}
MISDEEDS = {"lose_request", "lose_response", "double", "late"}


@cache
def calm(servers: int) -> dict[str, Any]:
    return spread("pserver", 3, recipe=ANY, options={"servers": servers, "min_block": 1})


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("train", "eval", "ids", "tensors"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
def test_sync_ends_bit_for_bit_although_trainers_die(servers: int, seed: int) -> None:
    """Between any two requests, as between pushes of one lease to two servers; each is started again at once, twice at
    most.
    """
    result = spread("pserver", 3, recipe=ANY, options={"servers": servers, "min_block": 1}, deaths=seed)
    assert same(result, calm(servers)) and result["died"] >= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize(
    "mode",
    [
        {"mode": "async"},
        pytest.param({"mode": "half_async"}, marks=slow),
        pytest.param({"mode": "geo", "geo_steps": 2}, marks=slow),
    ],
    ids=lambda mode: mode["mode"],
)
def test_each_ticket_is_applied_once_although_trainers_die(mode: dict[str, Any], servers: int, seed: int) -> None:
    result = spread("pserver", 3, options=mode | {"servers": servers, "min_block": 1}, deaths=seed, **LONG)
    assert Counter(i for step in result["ids"].values() for i in step) == Counter(
        dict.fromkeys(range(LONG["recipe"]["rows"]), 2)
    ), "two epochs"
    assert result["died"] >= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.slow
def test_sync_ends_bit_for_bit_as_on_a_good_network(servers: int, seed: int) -> None:
    result = spread("pserver", 3, recipe=ANY, options={"servers": servers, "min_block": 1}, network=seed)
    assert same(result, calm(servers))
    met = result["met"]
    assert met.keys() >= (MISDEEDS if servers > 1 else MISDEEDS - {"late"})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize(
    "mode", [{"mode": "async"}, pytest.param({"mode": "half_async"}, marks=slow)], ids=lambda mode: mode["mode"]
)
def test_each_ticket_is_applied_once(mode: dict[str, Any], servers: int, seed: int) -> None:
    """Also where two servers get the pushes in different orders, one of them before it has opened the step."""
    result = spread("pserver", 3, options=mode | {"servers": servers, "min_block": 1}, network=seed, **LONG)
    for epoch in range(2):
        assert Counter(i for step in range(5 * epoch, 5 * epoch + 5) for i in result["ids"][str(step)]) == Counter(
            range(LONG["recipe"]["rows"])
        )
    assert result["met"].keys() & MISDEEDS


@pytest.mark.parametrize("trainers", [1, pytest.param(3, marks=slow)])
def test_a_trainer_that_dies_between_its_pushes_to_two_servers(trainers: int) -> None:
    """The first server then has all shares of the step; it must not keep out whoever computes the second one's
    again.
    """
    case: dict[str, Any] = {
        "strategy": "pserver",
        "slots": trainers,
        "recipe": ANY,
        "options": {"servers": 2, "min_block": 1},
        "deaths": 0,
    }
    assert ranks(2, "tests.pserver.test_lossy_network:torn", **case)[0] == 1


def torn(rank: int, size: int, **case: Any) -> int | None:
    """Train with one death just there; how many there were."""
    from dtf.pserver.net import shared_memory
    from tests.support import harness
    from tests.support import in_process_servers as direct

    died: list[int] = []

    class Torn(direct.KillableTransport):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            shared_memory.LEAST_BYTES = 1 << 30  # messages are looked into here
            self._life.clients = getattr(self._life, "clients", 0) + 1
            self._second = self._life.clients == 2

        def start(self, method: str, data: bytes, deadline_s: float) -> Any:
            if self._second and b"finite" in data[:600] and not died:  # which only pushes have
                died.append(1)
                self._life.kill()
            return super().start(method, data, deadline_s)

    harness.KillableTransport, direct.HelperThreads.chance = Torn, 0.0  # type: ignore[misc]
    return harness.train(rank, size, **case).get("died")
