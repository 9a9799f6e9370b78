"""`job=checkpoint`: what it shows of a checkpoint, and what it says of a damaged one."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.api.job import Output
from dtf.checkpoint.manifest import BLOCK_BYTES
from dtf.checkpoint.options import Every
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.storage import MANIFEST, checkpoints, step_name
from dtf.config.compose import compose
from dtf.core.errors import ConfigError, DataError, Exit
from dtf.core.types import Box, State
from dtf.jobs.checkpoint import Action, Checkpoint
from tests.support.checkpoints import Together, checkpointer, on_ranks, whole

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 4 and 8, written by two ranks."""
    folder = tmp_path / "run"
    folder.mkdir()

    def save(world: Together, step: int) -> str:
        boxes = [Box("model/table", torch.full((2, 3), float(world.rank)), (4, 3), (2 * world.rank, 0))]
        if world.rank == 0:
            boxes += [
                whole("model/n", torch.tensor(step)),
                whole("optimizer/w/momentum", torch.zeros(500_000, dtype=torch.bfloat16)),
            ]
        return checkpointer(folder / "checkpoints", world).save(
            step, State(boxes, {}), {"clock": {"step": step, "best": float("inf")}, "seed": 7}, 0.75
        )

    for step in (4, 8):
        assert on_ranks(2, partial(save, step=step)) == [str(folder / "checkpoints" / step_name(step))] * 2
    return folder


def job(**options: Any) -> int:
    return Checkpoint(**options).run(None)  # type: ignore[arg-type]


def test_inspect_shows_what_a_checkpoint_holds(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(path=str(run_folder)) == Exit.OK
    words = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert str(run_folder / "checkpoints" / "step_000008") in words
    assert {"step 8", "run run-1", "strategy ddp", "ranks 2", "objective accuracy = 0.75 (max)", "files 4"} <= words
    assert {
        "model/table F32 4x3 2 48",
        "model/n I64 scalar 1 8",
        "optimizer/w/momentum BF16 500000 1 1,000,000",
    } <= words
    assert {"clock.step 8", "clock.best inf", "seed 7"} <= words


def test_inspect_writes_json_for_programs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(path=str(run_folder / "checkpoints" / "step_000004"), format=Output.json) == Exit.OK
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (shown["step"], shown["ranks"], shown["objective"]) == (
        4,
        2,
        {"metric": "accuracy", "mode": "max", "value": 0.75},
    )
    table = next(tensor for tensor in shown["tensors"] if tensor["name"] == "model/table")
    assert [box["offset"] for box in table["boxes"]] == [[0, 0], [2, 0]]
    assert shown["scalars"]["clock"] == {"step": 4, "best": "inf"}


def test_verify_names_the_bytes_that_differ(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder / "checkpoints" / "step_000008"
    big = folder / "rank_0.safetensors"
    assert job(path=str(folder), action=Action.verify) == Exit.OK
    assert capsys.readouterr().out.startswith(f"ok {folder}: 4 files, ")
    data = bytearray(big.read_bytes())
    data[700_000] ^= 1
    big.write_bytes(data)
    assert job(path=str(run_folder), action=Action.verify) == Exit.DATA
    assert (
        capsys.readouterr().out
        == f"damaged {folder}: rank_0.safetensors: bytes 0 to {min(BLOCK_BYTES, len(data))} are damaged or unreadable\n"
    )
    (folder / "extra").touch()
    assert job(path=str(run_folder), action=Action.verify, format=Output.json) == Exit.DATA
    assert json.loads(capsys.readouterr().out)["faults"] == ["unknown file 'extra' beside those of the manifest"]
    with pytest.raises(DataError, match="unknown file"):
        job(path=str(run_folder))
    assert job(path=str(folder.with_name("step_000004")), action=Action.verify) == Exit.OK


def test_looking_changes_nothing(run_folder: Path) -> None:
    (run_folder / "checkpoints" / "step_000009.tmp-alive").mkdir()
    before = sorted(path for path in run_folder.rglob("*"))
    for action in Action:
        job(path=str(run_folder), action=action)
    assert sorted(path for path in run_folder.rglob("*")) == before


def test_a_path_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.path"):
        job()
    for path in (tmp_path, tmp_path / "step_000001", "/dev/null"):
        with pytest.raises(DataError, match=r"job\.path"):
            job(path=str(path))
    with pytest.raises(DataError, match=r"job\.path=s3://bucket/x is no folder.*copy one here first"):
        job(path="s3://bucket/x")


def test_the_best_is_not_guessed_where_one_cannot_be_read(run_folder: Path) -> None:
    newest, *_ = checkpoints(run_folder / "checkpoints")
    assert resolve_checkpoints(run_folder / "best", "job.path")[0].is_dir()
    (newest / MANIFEST).write_text("{}")
    with pytest.raises(DataError, match=f"{newest.name} cannot be judged: .*; name one checkpoint"):
        resolve_checkpoints(run_folder / "best", "job.path")


def test_the_option_off_never_saves() -> None:
    assert compose(["checkpoint=off"]).config["checkpoint"] == {
        "name": "off",
        "every_steps": 0,
        "delta_every": None,
        "keep_last": 3,
        "keep_best": 1,
        "background": True,
        "mirror": "",
        "resume": "auto",
    }
    Every(every_steps=0).check()


def test_the_commit_layer_and_the_job_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, dtf.checkpoint.storage, dtf.jobs.checkpoint; sys.exit(', '.join({'torch', 'numpy', "
        "'safetensors'} & set(sys.modules)) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_inspect_says_what_an_earlier_checkpoint_has_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = checkpointer(tmp_path, delta_every=1)
    for step, name in ((1, "table/t/rows"), (2, "table/t/delta_1/rows")):
        layer = saver.layer(False)
        rows, count = (
            Box(name, torch.zeros(100), (100,), (0,), layer),
            whole("table/t/count", torch.tensor(1000 + step)),
        )
        saver.save(step, State([rows, count], {}), {})
    assert job(path=str(tmp_path / "step_000001")) == job(path=str(tmp_path / "step_000002")) == Exit.OK
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if line.startswith("t ")] == ["t 1,001 408", "t 1,002 808"]
    size = (tmp_path / "step_000001" / "rows_0.safetensors").stat().st_size
    assert [line for line in said if line.startswith(("base ", "shared "))] == [
        "base none",
        "shared nothing with checkpoints of earlier steps in this folder",
        f"base step 1, which has 1 of the files too: {size} bytes",
        f"shared 1 of the files, also in step_000001: {size} bytes",
    ]
