"""Models that strategies get wrong easily: each trains to one process's numbers, or is refused with the reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dtf.config.settings import load_parts
from tests.support.harness import ROWS, difference, spread

CASE: dict[str, Any] = {"plugin": "tests.support.corner_cases", "steps": 4, "eval_every": 2}
load_parts([])
PIPELINE = {"cuts": ["b", "c", "d"]}


def odd(kind: str) -> dict[str, Any]:
    return {**CASE, "recipe": {"name": "odd", "rows": ROWS, "kind": kind}}


@cache
def alone(kind: str, precision: str = "fp64") -> dict[str, Any]:
    return spread("ddp", 1, **odd(kind), precision=precision)


@pytest.mark.parametrize(
    ("kind", "strategy", "processes", "options"),
    [
        pytest.param("tied", "fsdp", 2, {}, marks=pytest.mark.slow),
        pytest.param("tied", "pipeline", 2, {}, marks=pytest.mark.slow),
        ("tied_blocks", "fsdp", 2, {}),
        pytest.param("tied_blocks", "pipeline", 4, PIPELINE, marks=pytest.mark.slow),
        pytest.param("gain", "pipeline", 4, PIPELINE, marks=pytest.mark.slow),
        pytest.param("tied_blocks", "fsdp", 3, {"unit": "layer"}, marks=pytest.mark.slow),
        pytest.param("frozen", "pipeline", 4, PIPELINE, marks=pytest.mark.slow),
        pytest.param("frozen", "pipeline", 2, {}, marks=pytest.mark.slow),
        ("frozen", "fsdp", 2, {}),
        pytest.param("frozen", "tensor", 2, {}, marks=pytest.mark.slow),
        pytest.param("root", "fsdp", 2, {"unit": "layer"}, marks=pytest.mark.slow),
        pytest.param("root", "pipeline", 2, {}, marks=pytest.mark.slow),
        ("unknown", "fsdp", 2, {}),
        ("stubborn", "fsdp", 2, {}),
        ("scalar", "pipeline", 2, {}),
        pytest.param("turned", "pipeline", 4, PIPELINE, marks=pytest.mark.slow),
        pytest.param("gain", "fsdp", 3, {"unit": "layer"}, marks=pytest.mark.slow),
        pytest.param("gain", "fsdp", 4, {"replicate": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_trains_as_in_one_process(kind: str, strategy: str, processes: int, options: dict[str, Any]) -> None:
    assert difference(alone(kind), spread(strategy, processes, options=options, **odd(kind))) <= 1e-10


@pytest.mark.parametrize("precision", [pytest.param("bf16_params", marks=pytest.mark.slow), "bf16_master"])
def test_a_format_that_a_model_chooses_crosses_a_cut(precision: str) -> None:
    case = odd("wide") | {"precision": precision}
    assert difference(alone("wide", precision), spread("pipeline", 4, options=PIPELINE, **case)) == 0.0


def test_a_scalar_has_a_master_copy_where_it_computes_in_another_format() -> None:
    case, precision = odd("gain") | {"precision": "bf16_master"}, "bf16_master"
    # gradients are rounded on the way
    assert difference(alone("gain", precision), spread("fsdp", 2, **case), without=("optimizer/",)) <= 0.05


@pytest.mark.parametrize(("strategy", "processes", "options"), [("pipeline", 2, {}), ("tensor", 4, {"degree": 2})])
def test_a_buffer_that_the_forward_pass_changes_is_refused(
    strategy: str, processes: int, options: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match="the forward pass changes the buffer count, which"):
        spread(strategy, processes, options=options, **odd("counting"))


@pytest.mark.parametrize(
    ("kind", "strategy", "options", "words"),
    [
        ("tied", "tensor", {}, "splits c, and another module has its weight too, which is cut in another way"),
        ("copying", "fsdp", {}, r"the forward pass copies the model \(Copying\) with copy.deepcopy\(\)"),
        ("stubborn", "pipeline", {}, "has a train\\(\\) of its own"),
        pytest.param(
            "early",
            "pipeline",
            {"virtual": 2},
            "the model draws random numbers in its forward pass",
            marks=pytest.mark.slow,
        ),
        ("alias", "pipeline", {}, "a tensor is changed in place later"),
        (
            "shrinking",
            "pipeline",
            {"cuts": ["c"]},
            r"another for rows of the same shape: \(\d, 12\) float32 after \(\d, 12\) float64",
        ),
        (
            "decaying",
            "pipeline",
            {"cuts": ["c"]},
            "changes the parameter b.weight.*or use strategy=ddp launcher.processes=1",
        ),
        ("penalised", "tensor", {}, "gives other outputs than the whole model"),
        ("prelu", "tensor", {}, "ranks that should agree have different gradients of act.weight"),
        pytest.param(
            "undropped", "tensor", {}, "ranks that should agree have different inputs of drop", marks=pytest.mark.slow
        ),
        ("rowless", "tensor", {}, "the forward pass of c \\(Linear\\) raised RuntimeError"),
    ],
)
def test_refused_with_the_reason(kind: str, strategy: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        spread(strategy, 2, options=options, **odd(kind))
