"""Whether the check at the start was made, or remembered, changes no bit of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.arrays import SAME_PROGRAM
from tests.support.harness import meshes, spread, variants

RUN = {"steps": 2, "eval_every": 2, "precision": "fp32"}


ONE_REPLICA = ("tensor", "pipeline")
"""Strategies in which two ranks divide no rows, so that nothing is checked."""


@pytest.mark.parametrize(
    ("strategy", "options", "processes"),
    [
        *(
            pytest.param(strategy, options, 2, marks=pytest.mark.slow if options or strategy in SAME_PROGRAM else ())
            for strategy, options in variants()
            if strategy not in ONE_REPLICA
        ),
        *(
            pytest.param(strategy, options, 4, marks=pytest.mark.slow if strategy == "tensor" else ())
            for strategy, options in meshes()
            if strategy in ONE_REPLICA
        ),
    ],
)
def test_a_remembered_check_changes_nothing(strategy: str, options: dict[str, Any], processes: int) -> None:
    made = spread(strategy, processes, options=options, checked=None, **RUN)
    found = made.pop("start_check")
    assert found is not None
    remembered = spread(strategy, processes, options=options, checked=found, **RUN)
    assert remembered.pop("start_check") == found
    assert remembered == made


@pytest.mark.parametrize(
    "precision",
    ["bf16_master", "fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16", "bf16_params"))],
)
def test_gradients_that_are_clipped_are_found_in_any_format(precision: str) -> None:
    case = {**RUN, "steps": 1, "precision": precision, "checked": None}
    clips = spread("ddp", 2, plugin="tests.support.clipping_model", recipe={"name": "clipping"}, **case)
    assert clips["start_check"] == {"clipped": "gradient of 0.weight", "padded": ""}
    assert spread("ddp", 2, **case)["start_check"] == {"clipped": "", "padded": ""}


def test_what_the_check_found_is_remembered_too() -> None:
    """Gradients that a model clips are summed in place of averaged."""
    case = {"plugin": "tests.support.clipping_model", "recipe": {"name": "clipping"}, **RUN}
    made = spread("ddp", 2, checked=None, **case)
    assert made["start_check"] == {"clipped": "gradient of 0.weight", "padded": ""}
    assert spread("ddp", 2, checked=made["start_check"], **case) == made
    assert spread("ddp", 2, checked={"clipped": ""}, **case)["tensors"] != made["tensors"]
