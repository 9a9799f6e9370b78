"""Each number that two runs are compared by has a bound of its own, in fp64 and in fp32."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from dtf.runs.compare import compare
from dtf.runs.recorded_run import RecordedRun

TENSORS = (
    "model/first.weight",
    "model/norm.running_mean",
    "model/norm.running_var",
    "model/codebook",
    "optimizer/first.weight/momentum",
    "optimizer/first.weight/step",
    "table/words/rows",
    "table/words/sum_sq",
)


def recorded() -> RecordedRun:
    draw = np.random.default_rng(0)
    tensors: dict[str, Any] = {name: draw.normal(size=(7, 3)) for name in TENSORS}
    return RecordedRun(
        metrics={step: {"loss": 2.0 / step, "grad_norm": 1.0 / step} for step in (1, 2)},
        ids={0: [[0, 1], [2, 3]], 1: [[4, 5], [6, 7]]},
        held=[],
        tensors=tensors | {"table/words/ids": np.arange(7)},
        evaluated={2: {"loss": 1.5, "top1": 0.5}},
    )


def first_difference(run: RecordedRun, exact: bool) -> str:
    return compare(recorded(), run, exact, lambda: [recorded(), recorded()]).first


@pytest.mark.parametrize("exact", [True, False])
def test_the_same_numbers_agree(exact: bool) -> None:
    run = recorded()
    for name in TENSORS:
        run.tensors[name] *= 1 + (1e-12 if exact else 1e-6)
    assert not first_difference(run, exact)


@pytest.mark.parametrize("factor", [1.5, 1.01, float("nan")])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", [*TENSORS, "loss", "grad_norm", "evaluation", "table/words/ids"])
def test_each_number_has_a_bound(name: str, exact: bool, factor: float) -> None:
    run = deepcopy(recorded())
    if name == "table/words/ids":
        run.tensors[name] = run.tensors[name] + 1
    elif name in TENSORS:
        run.tensors[name] *= factor
    elif name == "evaluation":
        run.evaluated[2]["loss"] *= factor
    else:
        run.metrics[2][name] *= factor
    found = first_difference(run, exact)
    assert name.rpartition("/")[2].rpartition(".")[2] in found, found


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["model/first.weight", "optimizer/first.weight/momentum", "model/norm.running_var"])
def test_what_rounding_moves_may_differ_ten_times_as_much(name: str, exact: bool) -> None:
    def moved(by: float) -> RecordedRun:
        run = recorded()
        run.tensors[name] *= 1 + by
        return run

    def verdict(by: float) -> Any:
        return compare(recorded(), moved(by), exact, lambda: [recorded(), moved(0.01)])

    assert verdict(0.09).ok and verdict(0.09).rounding
    assert not verdict(0.11).ok


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_not_finite_on_both_sides_alike_is_no_difference(exact: bool) -> None:
    run, reference = recorded(), recorded()
    for each in (run, reference):
        each.tensors["optimizer/first.weight/momentum"][0, 0] = np.nan
        each.tensors["model/norm.running_mean"][0, 0] = np.inf
    assert not compare(reference, run, exact).first
    run.tensors["model/norm.running_mean"][0, 0] = 1.0
    assert compare(reference, run, exact).first


def test_in_fp32_many_small_differences_are_one() -> None:
    """The largest of each tensor is within a thousandth of its largest number, and the tensor as a whole is not."""
    run, reference = recorded(), recorded()
    for each in (run, reference):
        each.tensors["optimizer/first.weight/momentum"] = np.array([1000.0, *np.zeros(999)])
    run.tensors["optimizer/first.weight/momentum"] = np.array([1000.0, *np.full(999, 0.9)])
    assert "all momentum together" in compare(reference, run, exact=False).first
