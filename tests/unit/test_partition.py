"""The cut is the best there is, and the table says what to expect of it."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.core.errors import ConfigError
from dtf.strategies.pipeline.partition import Cost, human, imbalance, memory, partition, table

SMALL = st.integers(0, 9)
COSTS = st.lists(st.builds(Cost, st.just("b"), SMALL.map(float), SMALL, SMALL, SMALL), min_size=1, max_size=8)


def every(count: int, stages: int) -> list[list[int]]:
    return [[0, *inner, count] for inner in itertools.combinations(range(1, count), stages - 1)]


@given(
    COSTS,
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.one_of(st.just(0), st.integers(1, 80)),
)
def test_the_best_of_all_cuts(costs: list[Cost], stages: int, in_flight: list[int], bound: int) -> None:
    """The least largest work that fits, then the least bytes across cuts, then the earliest cuts."""

    def needs(bounds: list[int]) -> int:
        return max(memory(costs, *ends, held) for ends, held in zip(pairwise(bounds), in_flight, strict=False))

    def order(bounds: list[int]) -> tuple[float, int, list[int]]:
        return (
            max(sum(c.work for c in costs[a:b]) for a, b in pairwise(bounds)),
            sum(costs[b - 1].boundary_bytes for b in bounds[1:-1]),
            bounds,
        )

    cuts = every(len(costs), stages)
    possible = [bounds for bounds in cuts if not bound or needs(bounds) <= bound]
    if possible:
        assert partition(costs, stages, in_flight[:stages], bound) == min(possible, key=order)
        assert partition(costs, stages, in_flight.__getitem__, bound) == min(possible, key=order)
    else:
        with pytest.raises(ConfigError) as caught:
            partition(costs, stages, in_flight[:stages], bound)
        if cuts:
            assert f"the least that one needs is {human(min(map(needs, cuts)))}:" in str(caught.value)
        else:
            assert f"{len(costs)} blocks do not make {stages} stages" in str(caught.value)


@given(st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=12), st.integers(1, 3))
def test_measured_times_are_cut_as_well_as_numbers_allow(works: list[float], stages: int) -> None:
    costs = [Cost("b", work, 0, 0, 0) for work in works]
    least = min(max(sum(works[a:b]) for a, b in pairwise(bounds)) for bounds in every(len(works), stages))
    bounds = partition(costs, stages, [1] * stages)
    assert max(sum(works[a:b]) for a, b in pairwise(bounds)) <= least * (1 + 1e-12)


def test_a_stage_holds_what_it_received() -> None:
    costs = [Cost("a", 1, 100, 10, 3), Cost("b", 1, 200, 20, 5), Cost("c", 1, 300, 30, 0)]
    assert memory(costs, 0, 2, 2) == 300 + 2 * 30
    assert memory(costs, 1, 3, 4) == 500 + 4 * (3 + 50)


def test_imbalance_is_the_excess_over_the_mean() -> None:
    costs = [Cost("b", work, 0, 0, 0) for work in (3.0, 1.0, 2.0)]
    assert imbalance(costs, [0, 1, 3]) == 0 and imbalance(costs, [0, 2, 3]) == pytest.approx(1 / 3)
    assert imbalance([Cost("b", 0.0, 0, 0, 0)], [0, 1]) == 0


def test_table() -> None:
    costs = [
        Cost("stem", 2.0, 2**20, 2**20, 2**19),
        Cost("body", 5.0, 2**21, 2**20, 2**19),
        Cost("neck", 1.0, 0, 2**10, 2**10),
        Cost("head", 2.0, 512, 0, 0),
    ]
    assert table(costs, [0, 1, 2, 4], [0, 1, 2], [3, 2, 1], 4, 1 / 3, "time").splitlines() == [
        "stage  rank  blocks         time     memory",
        "    0     0  stem          20.0%    4.0 MiB",
        "    1     1  body          50.0%    5.0 MiB",
        "    2     2  neck .. head  30.0%  513.5 KiB",
        "imbalance 50.0% (largest stage over the mean), predicted bubble 33.3% with 4 micro-batches",
        "largest block body with 50.0%: no cut into 3 stages has an imbalance below 50.0%",
    ]
