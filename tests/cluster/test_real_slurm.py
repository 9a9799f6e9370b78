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
def test_trainers_leave_their_nodes_where_that_of_the_servers_is_lost_at_a_start(tmp_path: Path) -> None:
    """Slurm requeues the component of the lost node, and leaves the other one running, which nobody would end."""
    run = tmp_path / "run"
    with slurmbox(tmp_path / "slurm", nodes=3) as box:
        campaign = Campaign(box, tmp_path, random.Random(0))
        job = campaign.submit(
            run, "strategy=pserver", "train.steps=2", "launcher.nodes=2", "launcher.processes=1",
            "launcher.allow_insecure=true",
        )  # fmt: skip
        box.wait(lambda: len([*run.glob("job/attempts/*/began.*")]) == 3, "all tasks")
        box.kill_node("n1")
        box.call("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=power")
        for component in box.jobs(job):
            box.wait_state(component["JobId"], "PENDING", patience_s=180)
        box.start_node("n1")
        assert box.wait_end(job) == "COMPLETED"


@needs_slurm
@pytest.mark.slow
def test_what_slurm_itself_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with slurmbox(tmp_path / "slurm") as box:
        campaign = Campaign(box, tmp_path, random.Random(0))
        box.call("scontrol", "update", "PartitionName=cancel", "MaxTime=60")
        for option, said in (
            ("partition=nope", "Invalid partition name"),
            ("constraint=nope", "Invalid feature specification"),
            ("memory=999G", "Memory specification can not be satisfied"),
            ("nodes=5", "Node count specification invalid"),
            ("cpus=99", "More processors requested than permitted"),
            ("hours=30", "Requested time limit is invalid"),
            ('extra=["--reservation=x"]', "Requested reservation is invalid"),
        ):
            limited = ["launcher.partition=cancel"] if option.startswith("hours") else []
            with pytest.raises(AssertionError, match=rf"(?s): 2: .*launcher\.{option.partition('=')[0]}=.*{said}"):
                campaign.submit(tmp_path / "refused", f"launcher.{option}", *limited)
            assert not (tmp_path / "refused").exists()
        job = campaign.submit(tmp_path / "mistake", 'launcher.srun=["--foo=1"]')
        assert box.wait_end(job) == "FAILED" and box.job(job)["Restarts"] == "0"
        status = campaign.dtf("job=status", f"job.run_folder={tmp_path / 'mistake'}")
        assert "srun started no task and ended with 255: unrecognized option '--foo=1'; correct launcher.srun" in status
        late = campaign.submit(tmp_path / "late", 'launcher.setup=["export DTF_DEADLINE=1700000000"]')
        assert box.wait_end(late) == "FAILED" and box.job(late)["Restarts"] == "2"
        assert "E_NO_PROGRESS" in campaign.dtf("job=status", f"job.run_folder={tmp_path / 'late'}")


@needs_slurm
@pytest.mark.slow
def test_a_run_saves_however_often_it_is_told_and_fails_where_it_is_not_requeued(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with slurmbox(tmp_path / "slurm") as box:
        campaign = Campaign(box, tmp_path, random.Random(0))
        job = campaign.submit(run, "train.steps=100000", "launcher.nodes=2", "launcher.processes=1")
        box.wait(lambda: newest(run), "a first checkpoint")
        for name in ("TERM", "INT", "TERM"):
            box.popen("scancel", "--state=RUNNING", f"--signal={name}", job).communicate(timeout=60)
        box.wait_state(job, "PENDING")
        assert [path.read_text() for path in (run / "job" / "attempts" / f"{job}.0").glob("code.*")] == ["75\n"] * 2
        assert not box.processes("-m\0dtf", "n1") and not box.processes("-m\0dtf", "n2")
        before = newest(run)
        box.wait(lambda: box.release(box.job(job)) or newest(run) > before, "a checkpoint of the second start")
        box.call("scontrol", "update", f"JobId={job}", "Requeue=0")
        box.call("scancel", "--signal=TERM", job)
        assert box.wait_end(job) == "FAILED"
        status = campaign.dtf("job=status", f"job.run_folder={run}")
    assert f"stopped at step {newest(run)}, and Slurm does not start it again: Requested operation is pres" in status


@needs_slurm
@pytest.mark.slow
def test_servers_that_wait_for_trainers_leave_when_one_has_failed_for_good(tmp_path: Path) -> None:
    run, python = tmp_path / "run", tmp_path / "python"
    waits = f"until [[ -e {run}/rank_0.log ]]; do sleep 0.1; done; echo boom >$DTF_REASON_FILE; exit 2"
    python.write_text(f'#!/bin/bash\n((SLURM_PROCID < 2)) || {{ {waits}; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    roles = ["strategy=pserver", "strategy.servers=2", "launcher.nodes=2", "launcher.processes=1"]
    with slurmbox(tmp_path / "slurm", nodes=3) as box:
        campaign = Campaign(box, tmp_path, random.Random(0))
        job = campaign.submit(run, *roles, "launcher.allow_insecure=true", f"launcher.python={python}")
        assert box.wait_end(job) == "FAILED" and box.job(job)["Restarts"] == "0"
        box.wait_idle()
        status = campaign.dtf("job=status", f"job.run_folder={run}")
    assert "exit code 2; boom" in status
    codes = [path.read_text() for path in sorted((run / "job" / "attempts" / f"{job}.0").glob("code.*"))]
    assert codes[:2] == ["75\n"] * 2


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pserver", "sweep"])
def test_nothing_is_lost_whatever_happens(mode: str, tmp_path: Path) -> None:
    """Fifteen disturbances of each; the whole record is in the folder of the test."""
    command = [sys.executable, "-m", "tests.support.slurm_campaign", str(tmp_path / "events"), f"--only={mode}"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run([*command, "--events=15"], cwd=root, env={**os.environ, "PYTHONPATH": root}, timeout=1800)
    assert done.returncode == 0
