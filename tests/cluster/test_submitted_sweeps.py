"""A sweep that is handed to a scheduler: one job with its trials, or a job for each as it decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtf.cli.main import main
from dtf.cluster import record
from dtf.core.errors import Exit
from tests.support.submission import HERE, SMALL

pytestmark = pytest.mark.usefixtures("elsewhere", "platform")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["budget.hours=1"], "budget.hours=1 is that of all trials"),
        (["launcher.nodes=1,2"], "launcher.* has several values"),
        (["train.epochs=null"], "train.steps"),
    ],
)
def test_a_sweep_whose_trials_no_job_could_run_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *HERE, "lr.peak=0.1,0.2", "train.epochs=1", *words]) == Exit.CONFIG
    assert reason in capsys.readouterr().err
    assert not list(Path().rglob("job.json"))


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["launcher.gpus=1", "launcher.processes=4"], "launcher.gpus=1"),
        (["strategy=dp", "launcher.nodes=2"], "launcher.nodes=2"),
        (["strategy=pserver", "strategy.servers=1", "launcher.nodes=2"], "launcher.allow_insecure=true"),
        (["launcher.nodes=1,2"], "launcher.* has several values"),
    ],
)
def test_so_is_a_sweep_that_decides_as_it_goes(
    words: list[str], reason: str, dry_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asha = ["lr.peak=0.1,0.2,0.3", "train.epochs=3", "sweep.prune=asha", f"launcher.dry_run={dry_run}"]
    assert main(["-m", *HERE, *asha, *words]) == Exit.CONFIG
    assert reason in capsys.readouterr().err
    assert os.listdir() == []


def test_a_grid_is_one_job_with_a_trial_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *SMALL, "lr.peak=0.1,0.2,0.4", "launcher.dry_run=true"]) == Exit.OK
    printed = capsys.readouterr().out
    assert [f"--trial={number}" in printed for number in range(4)] == [True, True, True, False]
    assert os.listdir() == []


@pytest.mark.slow
def test_a_sweep_runs_what_is_missing_in_its_next_job(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *SMALL, "run.dir=mine"]

    def submit(*values: str) -> int:
        assert main([*words, f"lr.peak={','.join(values)}"]) == Exit.OK
        known = record.find(Path("mine"))
        assert known is not None
        pids = known.handle["pids"].split()
        for pid in pids:
            os.waitpid(int(pid), 0)
        return len(pids)

    assert submit("0.1", "0.2") == 2
    assert submit("0.1", "0.2", "0.4") == 1
    capsys.readouterr()
    assert main([*words, "lr.peak=0.1,0.2,0.4"]) == Exit.OK
    assert "all trials were finished before" in capsys.readouterr().out
    assert main([*words, "lr.peak=0.1,0.2,0.4", "seed=3"]) == Exit.BUSY


@pytest.mark.slow
def test_a_sweep_that_decides_as_it_goes_submits_each_trial(capsys: pytest.CaptureFixture[str]) -> None:
    """The same trials, at the same numbers, as on this host."""
    words = ["-m", *SMALL, "step.batch_size=1024", "train.steps=null", "train.epochs=1", "train.eval_every=2"]
    words += ["lr.peak=0.05,0.1,0.2,0.4", "sweep.prune=asha", "launcher.threads=1"]
    assert main([*words, "run.dir=jobs"]) == Exit.OK
    assert main([*words, "run.dir=here", "launcher=local"]) == Exit.OK
    printed = capsys.readouterr().out
    jobs, here = ([line for line in printed.splitlines() if f" {name}/lr.peak" in line] for name in ("jobs", "here"))
    assert len(jobs) == 4 and [line.replace("jobs/", "here/") for line in jobs] == here
    assert any("pruned" in line for line in jobs)
