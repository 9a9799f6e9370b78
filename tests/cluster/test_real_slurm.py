"""launcher=slurm on a real Slurm: Debian's controller and nodes, in namespaces of this machine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.support.slurm_campaign import SMALL, Campaign, newest, unlike
from tests.support.slurmbox import missing, slurmbox

needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"no Slurm: {missing()}")


@needs_slurm
def test_a_job_that_is_preempted_while_it_starts_is_started_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with slurmbox(tmp_path / "slurm", nodes=1) as box:
        campaign = Campaign(box, tmp_path, random.Random(0))
        job = campaign.submit(run, "train.steps=2", "launcher.processes=1")
        box.wait(lambda: box.processes("--bundle=", "n1"), "the first process of dtf")
        campaign.preempt(job)
        assert box.wait_end(job) == "COMPLETED"
        status = campaign.dtf("job=status", f"job.run_folder={run}")
    assert f"slurm job {job}: finished (COMPLETED; on n1; 1 restart(s); newest checkpoint: step 2)" in status
    assert f"job {job}: stopped, exit code" in (run / "job" / f"slurm-{job}.log").read_text()


@needs_slurm
@pytest.mark.slow
def test_a_preempted_job_of_two_nodes_goes_on_and_has_the_same_bits(
    tmp_path: Path, run_dtf: Callable[..., Result]
) -> None:
    words = ["train.steps=150", "checkpoint.every_steps=50"]
    run, plain = tmp_path / "run", tmp_path / "plain"
    with slurmbox(tmp_path / "slurm") as box:
        campaign = Campaign(box, tmp_path, random.Random(0))
        job = campaign.submit(run, *words, "launcher.nodes=2", "launcher.processes=1", doctor=True)
        box.wait(lambda: newest(run), "a first checkpoint")
        campaign.preempt(job)
        saved = newest(run)
        assert run_dtf(*SMALL, *words, "launcher.processes=2", folder=plain).code == 0
        assert box.wait_end(job) == "COMPLETED"
        status = campaign.dtf("job=status", f"job.run_folder={run}")
        log = (run / "job" / f"slurm-{job}.log").read_text()
    assert f"slurm job {job}: finished (COMPLETED; on n[1-2]; 1 restart(s)" in status
    assert log.count("nothing is wrong") == 1  # job=doctor, before the first start alone
    assert 0 < saved < 150 and f"job {job}: start 1 on n[1-2], newest checkpoint: step {saved}" in log
    assert not unlike(run, plain)


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pserver", "sweep"])
def test_nothing_is_lost_whatever_happens(mode: str, tmp_path: Path) -> None:
    """Fifteen disturbances of each; the whole record is in the folder of the test."""
    command = [sys.executable, "-m", "tests.support.slurm_campaign", str(tmp_path / "events"), f"--only={mode}"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run([*command, "--events=15"], cwd=root, env={**os.environ, "PYTHONPATH": root}, timeout=1800)
    assert done.returncode == 0
