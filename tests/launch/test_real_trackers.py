"""observer=wandb (offline) and mlflow (SQLite) with the libraries themselves, where they are installed."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tracked_runs import measured, same

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RUN = [
    "train.epochs=null",
    "train.steps=30",
    "train.log_every=2",
    "train.eval_every=10",
    "train.eval_rows=64",
    "checkpoint.every_steps=10",
    "step.batch_size=32",
]
Rows = dict[tuple[str, int], dict[str, float]]


def command(folder: Path, tracker: str, *more: str) -> subprocess.Popen[str]:
    observers = f"observer=[console,jsonl,{tracker}]"
    return subprocess.Popen(
        [sys.executable, "-m", "dtf", *RUN, observers, f"run.dir={folder}", *more],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "warning" not in out
    return out


def killed_and_resumed(folder: Path, tracker: str) -> None:
    """Kill the launching process when it has reported steps after its second checkpoint; start it again."""
    process = command(folder, tracker)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step=24/"):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate()
    finish(command(folder, tracker))


def test_mlflow_has_metrics_jsonl_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    killed_and_resumed(folder, "mlflow")
    store = sqlite3.connect(tmp_path / "mlflow.db")
    found: Rows = {}
    for key, value, step, nan in store.execute("select key, value, step, is_nan from metrics"):
        split, _, metric = key.partition("/")
        if split != "best":
            assert metric not in found.setdefault((split, step), {}), f"{key} of step {step} is there twice"
            found[split, step][metric] = math.nan if nan else value
    assert same(ordered(found), ordered(measured(folder))) and ("eval", 30) in found
    assert store.execute("select name, status from runs").fetchall() == [("run", "FINISHED")]
    params = dict(store.execute("select key, value from params"))
    assert params["recipe.name"] == "resnet_shapes" and params["train.steps"] == "30"


def test_wandb_has_metrics_jsonl_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    killed_and_resumed(folder, "wandb")
    found: Rows = {}
    launches = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(launches) == 2 and len({path.name for path in launches}) == 1, "one run of the tracker"
    for path in launches:
        for record in wandb_records(path):
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            step = record.history.step.num
            for key, text in items.items():
                split, _, metric = key.partition("/")
                if metric:
                    assert metric not in found.setdefault((split, step), {}), f"{key} of step {step} is there twice"
                    found[split, step][metric] = float(json.loads(text))
    assert same(ordered(found), ordered(measured(folder))) and ("eval", 30) in found


def test_a_sweep_is_one_run_for_each_trial(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "sweep"
    finish(command(folder, "mlflow", "-m", "lr.peak=0.1,0.2", "train.steps=4", "checkpoint=off"))
    store = sqlite3.connect(tmp_path / "mlflow.db")
    names = [name for (name,) in store.execute("select name from runs order by start_time")]
    assert names == ["sweep", "lr.peak=0.1", "lr.peak=0.2"]
    parents = [value for (value,) in store.execute("select value from tags where key = 'mlflow.parentRunId'")]
    assert parents == [id for (id,) in store.execute("select run_uuid from runs where name = 'sweep'")] * 2


def ordered(rows: Rows) -> Rows:
    return {key: dict(sorted(values.items())) for key, values in rows.items()}


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format with a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, at, parts = path.read_bytes(), 7, b""
    block = 32768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
