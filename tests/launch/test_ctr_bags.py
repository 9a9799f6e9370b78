"""A model of clicks whose categories have several values, in use: predictions, and an export called without dtf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.recipes.ctr.log_data import Ids
from tests.launch.test_ctr_use import Run, encode, options


@pytest.mark.parametrize("ids", [Ids.hash, Ids.vocabulary])
def test_what_an_export_says_of_several_values_is_what_is_done_to_them(ids: Ids, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"user": ["a", "b", "a"], "tags": ["x||y", None, "y|z|y"], "places": [[7], [7, 8], []], "label": [0, 1, 0]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    read = options(tmp_path, "parquet", categories=["user"], bags=["tags", "places"], ids=ids, train=path, eval=path)
    values, lengths = read.inputs(tmp_path / "rows.parquet").fetch(np.arange(3), 0)[0]["bags"]
    about, arrays = json.loads(json.dumps(read.preprocessing())), read.preprocessing_arrays()
    all_fields = about | {"ids": about["ids"] | {"fields": about["ids"]["fields"] + about["bags"]["fields"]}}
    told = []
    for row in range(3):
        for field, (name, each) in enumerate((("tags", about["bags"]["between"]), ("places", None))):
            several = rows[name][row] or []
            for value in [text for text in several.split(each) if text] if isinstance(several, str) else several:
                alone = {"user": "", "tags": "", "places": "", name: value}
                told.append(encode(all_fields, arrays, alone)["ids"][1 + field])
    assert values.tolist() == told and lengths.tolist() == [[2, 1], [0, 2], [3, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("per_field", [False, True])
def test_predictions_are_what_the_exported_program_gives(per_field: bool, run_dtf: Run, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)
    rows: dict[str, Any] = {"user": draw.integers(0, 9, 300).tolist(), "label": draw.integers(0, 2, 300).tolist()}
    rows["tags"] = [draw.integers(0, 20, draw.integers(0, 5)).tolist() for _ in range(300)]
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    new = {"user": [1, 5, 7, 2], "tags": [[], [3, 3, 9], None, [1]]}  # all were trained
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    path = tmp_path / "rows.parquet"
    words = ["recipe=ctr_log", f"recipe.data.train={path}", f"recipe.data.eval={path}", "recipe.data.format=parquet"]
    words += ["recipe.data.categories=[user]", "recipe.data.bags=[tags]", f"recipe.data.cache={tmp_path}/cache"]
    words += ["recipe.model.table=sparse", "recipe.model.pooling=mean", "recipe.model.scale=0.3"]
    words += ["recipe.model.hidden=[8]", f"recipe.model.table_per_field={per_field}", "train.epochs=2"]
    run = run_dtf(*words, "step.batch_size=20", "optimizer=adam", "strategy.tables=auto", "launcher.processes=2")
    assert run.code == 0, run.err
    if per_field:
        assert "table_plan=" in run.out or "table plan" in run.out
    asked = run_dtf("job=predict", f"job.model={run.folder}", f"job.input={tmp_path}/new.parquet")
    made = run_dtf("job=export", f"job.model={run.folder}")
    assert (asked.code, made.code) == (0, 0), asked.err + made.err
    about = json.loads((made.folder / "model.json").read_text())
    inputs, _ = (
        options(tmp_path, "parquet", categories=["user"], bags=["tags"])
        .inputs(tmp_path / "new.parquet")
        .fetch(np.arange(4), 0)
    )
    bags = inputs["bags"]._asdict()
    given = {"user": inputs["ids"], "tags": bags} if per_field else {"ids": inputs["ids"], "bags": bags}
    assert list(about["inputs"]) == list(given) and about["inputs"]["tags" if per_field else "bags"]["values"]
    program = torch.export.load(made.folder / "model.pt2").module()
    told = [json.loads(line)["probability"] for line in (asked.folder / "predictions.jsonl").read_text().splitlines()]
    assert program(given).sigmoid().tolist() == pytest.approx(told, rel=1e-5)
