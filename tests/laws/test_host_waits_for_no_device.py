"""A step does not make the host wait for its device, and leaves the model where it is in memory: what a queue of work
that is far ahead needs, and CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import pytest

from dtf.api.registry import lookup
from tests.support.arrays import crossed
from tests.support.changing_model import RULES
from tests.support.harness import variants
from tests.support.ranks import ranks

CASES: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "fp32", "recipe": {"name": "shapes_toy"}},
    {"precision": "fp16", "optimizer": "adamw", "ema": 0.9},
]


def run(strategy: str, options: dict[str, Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    processes = sum(lookup("strategy", strategy)().roles(2).values())
    more = {"strategy": strategy, "options": options, "slots": 2, **case}
    return ranks(processes, "tests.support.host_reads:train", shared=True, **more)


def computing() -> list[tuple[str, dict[str, Any]]]:
    """The strategies all of whose ranks compute. Servers keep parameters in host memory, for which trainers wait."""
    return [(name, options) for name, options in variants() if len(lookup("strategy", name)().roles(1)) == 1]


@pytest.mark.parametrize(
    ("strategy", "options", "case"), crossed(computing(), [*range(len(CASES))], turns=[2, 0, 1], each=1)
)
def test_a_step_reads_nothing_from_the_device(strategy: str, options: dict[str, Any], case: int) -> None:
    for result in run(strategy, options, CASES[case]):
        assert result["steps"] == 3 and not result["waits"]


@pytest.mark.parametrize("kind", ["plain", *(kind for kind in RULES if kind != "cache")])  # a pass makes that one anew
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_parameters_and_buffers_stay_in_place(strategy: str, kind: str) -> None:
    changing = {"plugin": "tests.support.changing_model", "recipe": {"name": "changing", "kind": kind}}
    for result in run(strategy, {}, {"precision": "fp32"} if kind == "plain" else changing):
        assert result["places"] and all(len(replica) >= 3 for replica in result["places"])
        for replica in result["places"]:
            assert all(place == replica[0] for place in replica)
