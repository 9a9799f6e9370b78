"""Which rows of sparse tables go along with a model that is exported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.sparse_table import Pooling, Table
from dtf.core.errors import ConfigError
from dtf.core.nest import Bags
from dtf.jobs import rank_export
from dtf.jobs.export import Form, rows_text
from dtf.sparse.inference_module import InferenceModule
from dtf.sparse.living_table import table_class
from dtf.sparse.pruning import Pruning
from dtf.sparse.row_optimizers import RowAdagrad, RowSgd

SCORED: Any = SimpleNamespace(scalars={"program": {"table_steps": 9}})


def test_rows_of_high_score_go_along() -> None:
    """As scores are at the step of the checkpoint: a row that was shown more often, and longer ago, may be lower."""
    table = table_class(rule := RowAdagrad(evict_score=0.01, score_decay=0.5))(Table(2, 0, 100, 0.1), rule, 1, "t")
    rows = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    states: dict[str, Any] = {name: np.zeros((5, count), np.float32) for name, (count, _) in rule.states(2).items()}
    states |= {"life.score": np.array([8, 3, 1, 1, 0.5], np.float32), "life.last_step": np.array([5, 8, 9, 9, 9])}
    states["life.last_step"] = states["life.last_step"].astype(np.int32)
    table.put(np.array([50, 40, 30, 20, 10]), rows, states)  # scores at step 9: 0.5, 1.5, 1, 1, 0.5
    assert Pruning(min_score=1).kept(table, SCORED).tolist() == [20, 30, 40]
    assert Pruning(max_rows=2).kept(table, SCORED).tolist() == [20, 40], "of equals the smaller id"
    assert Pruning(min_score=1, max_rows=1).kept(table, SCORED).tolist() == [40]
    largest = np.array([50, 40, 30, 20, 10])[np.argsort(-np.linalg.norm(rows, axis=1))[:2]]
    assert Pruning(max_rows=2).kept(table, None).tolist() == sorted(largest), "none were saved: those of large norm"


def test_without_scores_rows_of_large_norm_go_along() -> None:
    table = table_class(rule := RowSgd())(Table(1, 0, 100, 0.1), rule, 1, "t")
    table.put(np.array([5, 3, 1, 2]), np.array([[-2.0], [1], [2], [0]], np.float32), {})
    assert Pruning(max_rows=2).kept(table, None).tolist() == [1, 5]
    assert Pruning(max_rows=9).kept(table, None).tolist() == [1, 2, 3, 5] and not Pruning()
    with pytest.raises(ConfigError, match=r"job.min_score=0.5: the run kept no scores .* table t; use job.max_rows"):
        Pruning(min_score=0.5).kept(table, None)


@pytest.mark.parametrize("pooling", [None, Pooling.mean])
def test_a_table_of_which_no_row_goes_along_gives_zeros(pooling: Pooling | None) -> None:
    """With numbers in each tensor: torch.export.save fails where one has none."""
    spec, none = Table(2, 0, 100, 0.1, pooling=pooling), (torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    module = InferenceModule(torch.nn.Identity(), {"t": none}, {"t": spec})
    for made in (module, module.bare(torch.nn.Identity())):
        assert all(tensor.numel() for tensor in made.state_dict().values())
        ids = torch.tensor([[5, -1]]) if pooling is None else Bags(torch.tensor([5, -1]), torch.tensor([2]))
        assert made({"t": ids})["t"].tolist() == ([[[0, 0], [0, 0]]] if pooling is None else [[0, 0]])
    assert next(iter(module.tables.values())).count == 0
    assert (
        rows_text("t", 0, 9, 1e38)
        == "table t: 0 rows went along, 9 stayed out, as no score is job.min_score=1e+38 or more"
    )
    assert rows_text("t", 0, 0, 1e38) == "table t: 0 rows went along, 0 stayed out"


def test_a_large_table_is_put_into_a_program_where_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"table/ids/count": 1 << 23}
    monkeypatch.setattr(rank_export, "available_bytes", lambda: 6 << 30)
    weights: Any = SimpleNamespace(source=lambda: SimpleNamespace(read=counts.__getitem__))
    recipe: Any = SimpleNamespace(tables=lambda: {"ids": Table(64, 0, 1 << 24, 0.1)})
    with pytest.raises(ConfigError, match=r"8,388,608 rows \(2.1 GB\).*job.max_rows=8388608 for all"):
        rank_export._refuse_large(weights, [Form.pt2], recipe)
    rank_export._refuse_large(weights, [Form.safetensors], recipe)
    monkeypatch.setattr(rank_export, "available_bytes", lambda: (6 << 30) - 1)
    with pytest.raises(ConfigError, match=r"holds them 3 times, and 6.4 GB .* are left; use job.max_rows=N"):
        rank_export._refuse_large(weights, [Form.safetensors], recipe)
    counts["table/ids/count"] = 1 << 22
    rank_export._refuse_large(weights, [Form.pt2], recipe)
