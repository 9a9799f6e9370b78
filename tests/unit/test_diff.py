"""job=diff: in what two runs differ, and the first step and tensor at which they part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dtf.checkpoint.manifest import StoredBox, StoredTensor
from dtf.config.compose import compose
from dtf.core.errors import ConfigError, DataError
from dtf.core.text import FLOPS
from dtf.data.loader import Reading
from dtf.runs import diff as diffs
from dtf.runs.diff import diff, lines
from dtf.runs.recorded_run import whole_tensor
from dtf.runs.results import read_runs
from tests.unit.test_report import run_folder

Tensors = dict[str, np.ndarray]
NEVER_ALIKE = count(1.0)


def tensors() -> Tensors:
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=(4, 2)) for name in ("model/a.weight", "model/b.weight", "optimizer/a.weight/sum")}


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, dict[tuple[str, int], Tensors]]:
    """Two runs with checkpoints after steps 10 and 20, whose tensors are those of the third."""
    folders = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    held = {(folder.name, step): tensors() for folder in folders for step in (10, 20)}
    for folder in folders:
        for step in (10, 20):
            (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)

    def compared(one: Path, other: Path) -> tuple[dict[str, float], list[str]]:
        a, b = (held[path.parents[1].name, int(path.name[5:])] for path in (one, other))
        return {name: diffs.relative(a[name], b[name]) for name in a.keys() & b.keys()}, sorted(a.keys() ^ b.keys())

    monkeypatch.setattr(diffs, "_tensors", compared)
    return *folders, held


def found(one: Path, other: Path, tolerance: float = 0.0) -> tuple[dict[str, Any], str]:
    a, b = read_runs([str(one), str(other)])
    result = diff(a, b, tolerance)
    json.dumps(result, allow_nan=False)
    return result, "\n".join(lines(result))


def change(folder: Path, first: int, by: Callable[[float], float], split: str = "train") -> None:
    """The loss from a step on."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    for row in rows:
        row["seconds"] *= 2.0
        row |= {name: next(NEVER_ALIKE) for name in ("rows_per_s", *FLOPS, *Reading().close())}
        if row["split"] == split and row["step"] >= first:
            row["loss"] = by(row["loss"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_same_run_twice_has_no_difference(both) -> None:
    a, b, _ = both
    change(a, 100, float)
    change(b, 100, float)
    result, text = found(a, b)
    assert result["config"] == result["code"] == {}
    assert "parts" in result and not result["parts"] and "no number differs" in text
    assert "train lines: 4 in common, alike" in text and "checkpoints: alike after steps 10, 20" in text


def test_the_first_step_and_tensor_are_named(both) -> None:
    a, b, held = both
    change(b, 15, lambda loss: loss * 1.5)
    held["b", 20]["model/b.weight"] *= 1.001
    held["b", 20]["optimizer/a.weight/sum"] *= 2
    result, text = found(a, b)
    assert result["checkpoints"]["tensor"] == "model/b.weight"
    assert result["checkpoints"]["worst"] == "optimizer/a.weight/sum"
    assert "the runs part: loss differs first after step 15: " in text
    assert "of the tensors, alike after step 10, model/b.weight differs by 0.001 after step 20" in text
    assert "2 of 3 tensors differ after step 20, most optimizer/a.weight/sum, by 1 of its largest value" in text


def test_what_is_within_the_tolerance_is_alike(both) -> None:
    a, b, held = both
    change(b, 5, lambda loss: loss * (1 + 1e-7))
    held["b", 10]["model/a.weight"] *= 1 + 1e-7
    assert found(a, b)[0]["parts"] and not found(a, b, 1e-5)[0]["parts"]
    held["b", 10]["model/a.weight"][0] = np.nan
    assert "model/a.weight differs after step 10" in found(a, b, 1e-5)[1]


def test_tensors_that_only_one_run_has_are_named(both) -> None:
    a, b, held = both
    del held["b", 10]["model/b.weight"]
    assert "only one run has model/b.weight" in found(a, b)[1]


def test_an_evaluation_may_differ_alone(both) -> None:
    a, b, _ = both
    change(b, 10, lambda loss: float("nan"), "eval")
    (b / "metrics.jsonl").write_text((b / "metrics.jsonl").read_text().replace("NaN", "null"))
    assert "the evaluation after step 10 differs while training agrees: loss 0.9 | None" in found(a, b)[1]


def test_config_code_and_sampled_rows(both, tmp_path: Path) -> None:
    a, _, _ = both
    other = run_folder(tmp_path / "c", strategy="fsdp", processes=4, seed=1)
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(record | {"git": "abc", "versions": {"torch": "2.11"}}))
    for folder, second in ((a, [2, 3]), (other, [2, 4])):
        rows = [{"step": 0, "ids": [0, 1]}, {"step": 1, "ids": second}]
        (folder / "record_rank_0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')
    result, text = found(a, other)
    assert result["config"]["seed"] == [0, 1] and result["config"]["world"] == ["2 x cpu", "4 x cpu"]
    assert result["code"] == {"git": [None, "abc"], "versions.torch": [None, "2.11"]}
    assert "config: 3 differences" in text and "  strategy.name: ddp | fsdp" in text
    assert "the runs part: sampled rows first differ in step 1: a alone has [3], b [4]" in text
    assert "checkpoints: none of the same step" in text


def test_two_runs_are_needed(run_dtf, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        run_folder(tmp_path / name)
    one = run_dtf("job=diff", f"job.runs=[{tmp_path / 'a'}]")
    assert one.code == 2 and "must be two run folders" in one.err
    three = run_dtf("job=diff", f"job.runs=['{tmp_path}/[ab]','{tmp_path}/c']")
    assert three.code == 2 and "stands for 3 run folders" in three.err
    done = run_dtf("job=diff", f"job.runs=[{tmp_path / 'a'},{tmp_path / 'b'}]", "job.format=json")
    assert done.code == 0 and json.loads(done.out)["parts"] == ""


def test_runs_that_trained(run_dtf, tmp_path: Path) -> None:
    """Real checkpoints: of other seeds nothing is alike, the data neither; of two launches of one run all is."""
    keys = ("plugins=[tests.support.toy]", "recipe=toy", "train.epochs=null", "train.steps=4", "train.record=true")
    keys += ("launcher=inline", "checkpoint.every_steps=2", "train.log_every=1", "observer=[jsonl]")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run_dtf(*keys, f"seed={seed}", folder=tmp_path / name).code == 0
    alike, _ = found(tmp_path / "a", tmp_path / "b")
    assert not alike["parts"] and alike["checkpoints"]["alike"] == 4 and not alike["rows"] and alike["data"] == {}
    apart, text = found(tmp_path / "a", tmp_path / "c")
    assert apart["checkpoints"]["first"] == 2 and "seed: 0 | 1" in text and "sampled rows first differ" in text
    damaged = tmp_path / "b" / "checkpoints" / "step_000002"
    (damaged / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=f"{damaged}: manifest.json is damaged"):
        found(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    unknown, text = found(tmp_path / "a", tmp_path / "b")
    assert unknown["checkpoints"]["common"] == [] and unknown["data"] is None
    assert "data: not known of both, as checkpoints hold it" in text


@pytest.mark.parametrize("key", ["ids", "removed"])
def test_ids_are_read_exactly(key: str, tmp_path: Path) -> None:
    ids, name = np.array([2**62 + 1, -(2**62) - 3]), f"table/t/delta_1/{key}"
    save_file({name: ids}, tmp_path / "a")
    stored = StoredTensor("I64", (2,), (StoredBox("a", name, (0,), (2,)),))
    assert whole_tensor(tmp_path, name, stored).tolist() == ids.tolist()


def test_a_run_folder_without_its_key_is_refused_with_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"is no override; a run folder is named by a key: job.runs=\[") as caught:
        compose(["job=diff", str(folder)])
    assert f"job.model={folder}" in str(caught.value)
