"""`job=chaos` on a small run: what it finds in a right run, and that it finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    "job=chaos",
    "recipe.data.pixels=8",
    "recipe.data.train_rows=128",
    "step.batch_size=14",
    "job.steps=8",
    "job.save_every=3",
    "job.eval_rows=24",
    "launcher.processes=2",
]


@pytest.mark.slow
def test_faults_of_all_kinds_cost_nothing_but_time(run_dtf: Any, tmp_path: Path) -> None:
    folder = tmp_path / "chaos"
    strategies = "job.strategies=['ddp processes=2','pserver processes=2 servers=1']"
    done = run_dtf(*SMALL, strategies, "job.trials=14", folder=folder)
    assert done.code == 0, done.err + done.out
    first = (folder / "trials.jsonl").read_text()
    assert len(first.splitlines()) == 14
    done = run_dtf(*SMALL, strategies, "job.trials=16", folder=folder)
    assert done.code == 0, done.err + done.out
    assert (folder / "trials.jsonl").read_text().startswith(first) and "undisturbed" not in done.out, "it went on"
    report = json.loads((folder / "chaos.json").read_text())
    assert report["ok"] and report["rows"][-1]["trials"] >= 14
    assert run_dtf(*SMALL, strategies, "job.steps=9", folder=folder).code == 2, "trials of another config"


@pytest.mark.slow
def test_a_run_goes_on_under_other_strategies(run_dtf: Any, tmp_path: Path) -> None:
    folder = tmp_path / "chaos"
    strategies = "job.strategies=['ddp processes=2','fsdp processes=3','pserver processes=2 servers=1']"
    more = ["precision=fp64", "step.micro_batch_rows=5", "job.faults=[hand_over]", "job.trials=6"]
    done = run_dtf(*SMALL, strategies, *more, folder=folder)
    assert done.code == 0, done.err + done.out
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert all(trial["equal"] for trial in trials) and any("on under" in str(trial["done"]) for trial in trials)
    assert len({trial["strategy"] for trial in trials}) == 3


@pytest.mark.slow
def test_a_run_that_loses_rows_is_broken(run_dtf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtf.jobs.chaos import reference

    make = reference._make

    def forged(subject: Any, place: Path, check: Any) -> None:
        make(subject, place, check)
        record = next((place / "first").glob("record_rank_0.jsonl"))
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        for line in lines:
            if "ids" in line and line["step"] == 5:
                line["ids"][0] += 1
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(reference, "_make", forged)
    done = run_dtf(*SMALL, "strategy=ddp", "job.faults=[kill_rank]", "job.trials=1")
    assert done.code == 1 and "BROKEN: differs: sample ids at step 5" in done.out, done.out + done.err
