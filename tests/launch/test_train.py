"""job=train with launcher=local, whole: what a command leaves behind, and what a killed rank changes (nothing)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtf.core.errors import Exit

SMALL = [
    "recipe.data.train_rows=96",
    "recipe.data.eval_rows=16",
    "step.batch_size=16",
    "launcher.devices=cpu",
    "launcher.processes=2",
]


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Names and bytes of all tensors of a checkpoint."""
    from safetensors import safe_open

    found = {}
    for path in sorted((folder / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                found[f"{path.name}/{name}"] = file.get_tensor(name).tobytes()
    return found


def test_a_run_leaves_its_folder(run_dtf) -> None:
    done = run_dtf(*SMALL, "train.steps=2", "observer=[console,jsonl,resources,tensorboard]")
    assert done.code == Exit.OK, done.err
    record = json.loads((done.folder / "run.json").read_text())
    assert (record["exit"], record["cause"], record["world"]["processes"]) == (0, "finished", 2)
    assert {"config.yaml", "rank_0.log", "rank_1.log", "metrics.jsonl"} <= {path.name for path in done.folder.iterdir()}
    modes = {path.relative_to(done.folder): oct(path.stat().st_mode & 0o777) for path in done.folder.rglob("*")}
    assert Path("checkpoints/step_000002/manifest.json") in modes
    assert any("tfevents" in path.name for path in modes)
    assert {path: mode for path, mode in modes.items() if mode not in ("0o600", "0o700")} == {}
    again = run_dtf(*SMALL, "train.steps=2", "seed=1", folder=done.folder)
    assert again.code == Exit.BUSY
    assert "holds a run with seed=0, this one has seed=1" in again.err


@pytest.mark.slow
def test_a_killed_rank_changes_nothing(run_dtf) -> None:
    """Restarted from the last checkpoint, the run ends with the parameters and optimizer state of an undisturbed one,
    bit for bit.
    """
    options = ["plugins=[tests.support.toy,tests.support.kill_once]", "recipe=toy", *SMALL[2:]]
    options += ["train.steps=8", "train.log_every=1", "train.eval_every=0", "checkpoint.every_steps=2"]
    calm = run_dtf(*options, "observer=[]")
    killed = run_dtf(*options, "observer=[kill_once]", "observer.kill_once.step=5")
    assert calm.code == killed.code == Exit.OK, killed.err
    assert "---- attempt 1" in (killed.folder / "rank_0.log").read_text()
    expected = tensors(calm.folder, 8)
    assert expected and tensors(killed.folder, 8) == expected


def test_parameters_that_servers_hold_are_not_perturbed(run_dtf) -> None:
    done = run_dtf(*SMALL, "train.steps=2", "strategy=pserver", "train.perturb=3")
    assert done.code == Exit.CONFIG
    assert "train.perturb=3" in done.err and "strategy=pserver" in done.err


def test_a_divergence_is_told_once_and_recorded(run_dtf) -> None:
    done = run_dtf(*SMALL, "train.steps=2", "lr.peak=1e30", "train.log_every=1")
    assert done.code == Exit.DIVERGED
    assert done.err.count("error[E_DIVERGED]") == 1
    record = json.loads((done.folder / "run.json").read_text())
    assert record["exit"] == Exit.DIVERGED and "not finite" in record["cause"]
