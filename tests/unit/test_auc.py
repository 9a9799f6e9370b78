"""The area under the ROC curve: scikit-learn's number, whoever holds which rows in which order; a histogram within the
bound it tells.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn
from torch import Tensor

from dtf.model import auc as auc_module
from dtf.model.auc import AucEvaluator, auc, grouped_auc
from tests.support.auc_ranks import rows_of
from tests.support.ranks import ranks

SCORES = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5]))  # ties are likely
ROWS = st.integers(2, 60).flatmap(
    lambda n: st.tuples(
        hn.arrays(np.float32, n, elements=SCORES),
        hn.arrays(np.bool_, n),
        hn.arrays(np.int64, n, elements=st.integers(0, 3)),
    )
)


class OneRank:
    """One rank without others."""

    def reduce(self, sums: Tensor) -> Tensor:
        return sums

    def collect(self, rows: Tensor) -> Tensor | None:
        return rows

    def broadcast(self, value: dict) -> dict:
        return value


def expected(scores: np.ndarray, clicked: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score  # a second, in each process that collects this file

    return float(roc_auc_score(clicked, scores)) if 0 < clicked.sum() < len(clicked) else float("nan")


@given(ROWS, st.randoms(use_true_random=False))
def test_equals_scikit_learn_in_any_order(rows: tuple[np.ndarray, np.ndarray, np.ndarray], random: object) -> None:
    scores, clicked, _ = rows
    found = auc(scores, clicked)
    assert found == pytest.approx(expected(scores, clicked), abs=1e-12, nan_ok=True)
    order = np.arange(len(scores))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert auc(scores[order], clicked[order]) == pytest.approx(found, abs=0, nan_ok=True)


@given(ROWS)
def test_groups_count_by_their_rows(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    scores, clicked, groups = rows
    parts = [(expected(scores[groups == g], clicked[groups == g]), int((groups == g).sum())) for g in np.unique(groups)]
    known = [(area, count) for area, count in parts if area == area]
    mean = sum(area * count for area, count in known) / sum(count for _, count in known) if known else float("nan")
    assert grouped_auc(scores, clicked, groups) == pytest.approx(mean, abs=1e-12, nan_ok=True)


def test_groups_cost_no_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    scores, clicked, groups = (
        random.standard_normal(20_000),
        random.random(20_000) < 0.3,
        random.integers(0, 5000, 20_000),
    )
    known = [(expected(scores[groups == g], clicked[groups == g]), int((groups == g).sum())) for g in range(300)]
    inside = groups < 300
    calls, counts = [], auc_module._counts
    monkeypatch.setattr(auc_module, "_counts", lambda *arguments: calls.append(1) or counts(*arguments))
    found = grouped_auc(scores[inside], clicked[inside], groups[inside])
    some = [(area, rows) for area, rows in known if area == area]
    assert (
        found == pytest.approx(sum(area * rows for area, rows in some) / sum(rows for _, rows in some), abs=1e-12)
        and len(calls) == 1
    )


@settings(max_examples=30)
@given(ROWS)
def test_a_histogram_is_within_the_bound_it_tells(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    scores, clicked, _ = rows
    evaluator = AucEvaluator(auc_module.EXACT_ROWS + 1)
    columns = [torch.from_numpy(column.astype(np.float32)) for column in (scores, clicked)]
    evaluator.add(torch.stack([*columns, torch.ones(len(scores))], 1))
    evaluator.add(torch.tensor([[3.0, 1.0, 0.0]]))  # padding
    found = evaluator.values(OneRank())
    exact = auc(scores, clicked)
    assert found["auc"] == pytest.approx(exact, abs=found["auc_error"] + 1e-12) or exact != exact


def test_a_histogram_of_many_is_close() -> None:
    random = np.random.default_rng(0)
    clicked = random.random(200_000) < 0.2
    scores = (random.standard_normal(200_000) + clicked).astype(np.float32)
    evaluator = AucEvaluator(auc_module.EXACT_ROWS + 1)
    for part in np.array_split(np.arange(200_000), 7):
        evaluator.add(torch.from_numpy(np.stack([scores[part], clicked[part], np.ones(len(part))], 1)))
    found = evaluator.values(OneRank())
    assert abs(found["auc"] - auc(scores, clicked)) <= found["auc_error"] < 2e-4


@pytest.mark.parametrize("rows", [10, auc_module.EXACT_ROWS + 1])
def test_a_score_that_is_no_number_leaves_no_area(rows: int) -> None:
    evaluator = AucEvaluator(rows)
    evaluator.add(torch.tensor([[0.1, 1.0, 1.0], [torch.nan, 0.0, 1.0], [torch.inf, 0.0, 1.0]]))
    assert np.isnan(evaluator.values(OneRank())["auc"])


def test_bins_are_in_the_order_of_scores() -> None:
    scores = torch.tensor(
        [-torch.inf, -1e30, -2.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1.001, 2.0, 1e30, torch.inf, torch.nan]
    )
    bins = auc_module._bin(scores)
    assert (bins.diff() > 0).all() and bins.min() >= 0 and bins.max() < 1 << auc_module.BITS
    assert auc_module._bin(torch.tensor([-0.0])) == auc_module._bin(torch.tensor([0.0]))


@pytest.mark.parametrize(
    "size", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_any_number_of_ranks_is_told_the_same(size: int) -> None:
    scores, clicked, _, groups = rows_of(grouped=True).numpy().T
    found, binned = zip(*ranks(size, "tests.support.auc_ranks:told", shared=True), strict=True)
    assert all(each == found[0] for each in found)
    assert found[0]["auc"] == pytest.approx(expected(scores, clicked), abs=1e-12)
    assert found[0]["group_auc"] == pytest.approx(grouped_auc(scores, clicked, groups), abs=0)
    assert all(each == binned[0] for each in binned)
    assert abs(binned[0]["auc"] - found[0]["auc"]) <= binned[0]["auc_error"] + 1e-12
