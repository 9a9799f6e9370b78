"""Rules that say which server holds what: those of dtf, and one of somebody else's."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.core.errors import ConfigError
from dtf.pserver.placement import place_slices
from tests.conftest import Result
from tests.support.biggest_first import biggest_first
from tests.support.toy import Toy  # noqa: F401 (registers itself)

SIZES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(1, 99), min_size=n, max_size=n)),
)


@given(SIZES, st.integers(4, 6), st.sampled_from(["round_robin", "hash_name", "biggest_first"]))
def test_slices_of_a_parameter_go_to_different_servers(sizes: dict[str, list[int]], servers: int, rule: str) -> None:
    placed = place_slices(rule, sizes, servers)
    assert placed.keys() == sizes.keys()
    for name, owners in placed.items():
        assert len(owners) == len(set(owners)) == len(sizes[name])
        assert set(owners) <= set(range(servers))


def test_biggest_first_balances() -> None:
    assert biggest_first({"a": [9], "b": [5], "c": [4]}, 2) == {"a": [0], "b": [1], "c": [1]}


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy\.placement=round_robbin is not registered; did you mean round_robin\?"
    ):
        place_slices("round_robbin", {}, 1)


@pytest.mark.slow
def test_a_rule_of_a_plugin_decides_and_changes_no_number(run_dtf: Callable[..., Result]) -> None:
    task = [
        "plugins=[tests.support.toy,tests.support.biggest_first]",
        "recipe=toy",
        "strategy=pserver",
        "strategy.servers=2",
        "strategy.min_block=100000",
        "train.steps=3",
    ]
    more = [
        "launcher.processes=1",
        "launcher.devices=cpu",
        "launcher.threads=1",
        "observer=[console,jsonl]",
        "train.log_every=1",
        "step.batch_size=24",
    ]
    runs = [run_dtf(*task, *more, f"strategy.placement={rule}") for rule in ("biggest_first", "round_robin")]
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    held = [json.loads((run.folder / "run.json").read_text())["table"]["servers"] for run in runs]
    assert held[0] != held[1]
    losses = [
        [json.loads(line).get("loss") for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        for run in runs
    ]
    assert losses[0] == losses[1]
