"""`job=export` of some rows of a sparse table: how many went along, and what the others cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result

Run = Callable[..., Result]

CLICKS = (
    "recipe=ctr_clicks_sparse",
    "recipe.data.values=500",
    "recipe.data.train_rows=2000",
    "recipe.data.eval_rows=300",
    "step.batch_size=100",
    "launcher.processes=1",
    "observer=[]",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dtf.cli.main import main

    folder = tmp_path_factory.mktemp("scored") / "run"
    living = ("sparse=rowwise_adagrad", "sparse.when_full=evict", "sparse.score_decay=1")
    assert not main([*CLICKS, *living, f"run.dir={folder}"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("option", ["job.min_score=20", "job.max_rows=100", "job.max_rows=1000000"])
def test_an_export_says_what_the_rows_that_stayed_out_cost(option: str, trained: Path, run_dtf: Run) -> None:
    result = run_dtf("job=export", f"job.model={trained}", option)
    assert result.code == 0, result.err
    told = json.loads((result.folder / "model.json").read_text())
    evaluated = run_dtf("job=evaluate", f"job.model={trained}", "launcher.processes=1")
    whole = json.loads((evaluated.folder / "evaluation.json").read_text())["metrics"]
    assert told["evaluation"]["all_rows"] == pytest.approx(whole, rel=1e-3), "rows that were drawn are about zeros"
    rows = told["rows"]["ids"]
    if option == "job.max_rows=1000000":
        assert not rows["left_out"] and told["evaluation"]["kept_rows"] == told["evaluation"]["all_rows"]
    else:
        assert rows["kept"] and rows["left_out"] and (rows["kept"] == 100 or "score" in option)
        assert told["evaluation"]["kept_rows"]["loss"] != told["evaluation"]["all_rows"]["loss"]
    assert f"table ids: {rows['kept']:,} rows went along, {rows['left_out']:,} stayed out" in result.out
