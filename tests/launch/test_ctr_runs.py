"""A model with a sparse table from the command line: trained, evaluated under another strategy, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

SMALL = (
    "recipe=ctr_clicks_sparse",
    "recipe.data.values=3000",
    "recipe.data.train_rows=6000",
    "recipe.data.eval_rows=2000",
    "step.batch_size=500",
)
TRAIN = (
    *SMALL,
    "sparse=sgd",
    "sparse.weight_decay=0.1",
    "sparse.lr_factor=1",
    "sparse.values=bf16",
    "launcher.processes=2",
    "observer=[jsonl,console]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "run"


def on_disk(parent: Path) -> tuple[str, str]:
    return f"sparse.disk={parent / 'rows'}", "sparse.memory_gb=0.001"


@pytest.fixture
def trained(folder: Path, run_dtf: Any) -> Path:
    """The folder of the run, which is made where no test before has."""
    if not folder.exists():
        assert run_dtf(*TRAIN, *on_disk(folder.parent), folder=folder).code == 0
    return folder


def test_trains(folder: Path, run_dtf: Any) -> None:
    result = run_dtf(*TRAIN, *on_disk(folder.parent), folder=folder)
    assert result.code == 0, result.err
    assert list((folder.parent / "rows").iterdir()) == [], "the run has ended"
    assert "up to 3,000 rows of 16 numbers" in result.out + result.err
    assert "best_possible" in result.out + result.err


@pytest.mark.parametrize("disk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluates_under_another_strategy_to_the_same_numbers(
    disk: bool, trained: Path, run_dtf: Any, tmp_path: Path
) -> None:
    """The command line says nothing of sgd, bfloat16 or the disk: rows are read where they lie, as they are after their
    lazy decay; or they lie on a disk of the evaluation.
    """
    words = ("job=evaluate", f"job.model={trained}", "strategy=fsdp", "launcher.processes=2")
    result = run_dtf(*words, *(on_disk(tmp_path) if disk else ()), folder=tmp_path / "e")
    assert result.code == 0, result.err
    assert not disk or list((tmp_path / "rows").iterdir()) == [], "the job has ended"
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "eval"][-1]
    found = json.loads((tmp_path / "e" / "evaluation.json").read_text())["metrics"]
    assert found == pytest.approx({name: last[name] for name in found}, rel=1e-6)


@pytest.mark.slow
def test_the_exported_program_takes_ids(trained: Path, run_dtf: Any, tmp_path: Path) -> None:
    result = run_dtf("job=export", f"job.model={trained}", folder=tmp_path / "x")
    assert result.code == 0, result.err
    program = torch.export.load(tmp_path / "x" / "model.pt2").module()
    inputs = {"ids": torch.full((3, 26), -1), "dense": torch.zeros(3, 13)}
    missing = program(inputs).detach()
    assert missing == pytest.approx(missing[0].item(), rel=1e-5)  # zeros for all
    assert program(inputs | {"ids": torch.zeros(3, 26, dtype=torch.int64)})[0].item() != pytest.approx(
        missing[0].item(), rel=1e-5
    )


def test_weights_without_tables_are_refused(trained: Path, run_dtf: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from dtf.model.pretrained import open_weights

    weights = open_weights(str(trained), "job.model")
    save_file({name: weights.read(name) for name in weights.shapes}, tmp_path / "tower.safetensors")
    result = run_dtf("job=evaluate", f"job.model={tmp_path / 'tower.safetensors'}", *SMALL, folder=tmp_path / "e")
    assert result.code == 2
    assert "holds no sparse tables" in result.err
