"""`sweep.parallel`: each trial with its share of the host, and a sweep, a slot or a trial that ends at any moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dtf.cli import slots
from dtf.cli.main import main
from dtf.core.errors import ConfigError, Exit
from dtf.host import devices
from dtf.runs.budget import spent_s
from dtf.runs.results import read_runs

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))
PAPER = [
    "-m",
    "plugins=[tests.support.paper_runs,tests.support.toy]",
    "job=paper",
    "recipe=toy",
    "launcher=inline",
    "launcher.devices=cpu",
    "train.epochs=9",
    "run.dir=home",
]
TWO = [*PAPER, "sweep.parallel=2"]
HOSTS = ["launcher.nodes=2", "launcher.node_rank=0", "launcher.address=127.0.0.1:29500"]
RATES = "lr.peak=0.001,0.003,0.01,0.03,0.1,0.3,1,3,10"

Capture = pytest.CaptureFixture[str]

needs_two_cores = pytest.mark.skipif(CORES < 2, reason="two trials at once need two cores")


def records(home: Path) -> dict[str, dict]:
    """run.json of every trial, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in home.glob("*/run.json")}


@needs_two_cores
def test_two_at_once_with_halves_of_the_cores_reach_the_best_in_two_fifths_of_the_steps(
    capsys: Capture, elsewhere: Path
) -> None:
    """A process that dies takes its trial along, and no other."""
    assert main([*TWO, "sweep.prune=asha", "job.dies=0.03", RATES]) == Exit.PEER
    out, err = capsys.readouterr()
    assert "the process of trial 4 was killed by SIGKILL; the same sweep started again runs" in err
    assert "1 of 9 trials failed: lr.peak=0.03 (E_PEER)" in err
    ends = {line.split(":")[1].split("  ")[0].strip(): line for line in out.splitlines()[-10:-1]}
    assert out.splitlines()[-1].startswith("dtf: 1 of 9 trials finished, 7 pruned, the best is trial 5, ")
    assert "pruned at step 5" in out and "pruned at step 15" in out, ends
    assert json.loads((elsewhere / "home/sweep.json").read_text())["pruned"]["lr.peak=10"] == 5
    shares = {line.partition("cores ")[2].partition("]")[0] for line in out.splitlines() if ": cores [" in line}
    assert len(shares) == 2 and not set.intersection(*(set(share.strip("[").split(", ")) for share in shares))
    assert "cores" in (elsewhere / "home/lr.peak=0.1" / slots.LOG).read_text()
    states = {result.folder.name: (result.state, result.standing) for result in read_runs(["home"])}
    assert states["lr.peak=0.1"] == ("finished", "step 45/45  top1=1.0000  best=1.0000")
    assert states["lr.peak=10"] == ("pruned at step 5", "step 5/45  top1=-0.5556  best=-0.5556")
    assert states["lr.peak=0.03"][0] == "under way, or killed"
    found = records(elsewhere / "home")
    steps = sum(max(map(int, record["evaluations"])) for record in found.values())
    assert steps <= 0.4 * 9 * 45 and max(map(int, found["lr.peak=0.1"]["evaluations"])) == 45


HOLDING = [
    "-m",
    "plugins=[tests.support.blocked_recipe]",
    "recipe=holding",
    "recipe.epoch=3",
    "launcher.devices=cpu",
    "launcher.processes=2",
    "launcher.threads=1",
    "step.batch_size=48",
    "train.steps=12",
    "train.eval_every=4",
    "checkpoint.every_steps=4",
    "observer=[]",
    "seed=3",
    "run.dir=home",
    "sweep.parallel=2",
]


@pytest.fixture(params=["paper", "ranks"])
def held(request: pytest.FixtureRequest, elsewhere: Path) -> Iterator[tuple[subprocess.Popen[str], list[str], Path]]:
    """A sweep of three trials, two at once, that both wait in their middle, saved; its words; the file that holds
    them. With ranks there are two for each.
    """
    hold = elsewhere / "hold"
    hold.touch()
    own = [*TWO, f"job.hold={hold}"] if request.param == "paper" else [*HOLDING, f"recipe.hold={hold}"]
    words = [*own, "lr.peak=0.1,0.2,0.3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dtf", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    begun = "run.json" if request.param == "paper" else "checkpoints/step_000004"
    while len([*(elsewhere / "home").glob(f"*/{begun}")]) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    yield process, words, hold
    process.kill()
    process.wait()


def descendants(pid: int) -> set[int]:
    """All processes below one, as far as the kernel tells."""
    children = {int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()}
    return children.union(*map(descendants, children))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@needs_two_cores
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_told_to_stop_saves_what_runs_and_goes_on(
    number: int, held: tuple[subprocess.Popen[str], list[str], Path], capsys: Capture, elsewhere: Path
) -> None:
    process, words, hold = held
    process.send_signal(number)
    hold.unlink()
    said = process.communicate()[0]
    assert process.returncode == Exit.PREEMPTED, said
    assert "trial 3: not begun" in said and said.count(": stopped, goes on  ") == 2 and "the sweep stops here" in said
    assert "failed" not in said, "a trial that had gone on was finished at most"
    assert main(words) == Exit.OK
    assert "dtf: 3 of 3 trials finished" in capsys.readouterr().out


@needs_two_cores
@pytest.mark.slow
def test_nothing_outlives_a_sweep_that_is_killed_and_it_goes_on(
    held: tuple[subprocess.Popen[str], list[str], Path], capsys: Capture, elsewhere: Path
) -> None:
    process, words, hold = held
    below = descendants(process.pid)
    assert len(below) >= 2
    process.kill()
    process.communicate()
    while not all(is_gone(pid) for pid in below):  # the kernel kills them one after the other
        time.sleep(0.001)
    hold.unlink()
    assert main(words) == Exit.OK
    assert "dtf: 3 of 3 trials finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.parallel=900"], "sweep.parallel=900 needs a core for each trial, there "),
        (
            ["launcher=static", *HOSTS, "sweep.parallel=2"],
            "launcher=static starts processes elsewhere; use launcher=local",
        ),
        (["launcher=slurm", "budget.hours=2"], "budget.hours=2 is that of all trials of a sweep together, and jobs of"),
        (["sweep.factor=4"], "sweep.factor=4 is of sweep.prune, which is none; choose asha or median"),
        (["sweep.prune=asha", "sweep.factor=4"], "lets one trial in sweep.factor=4 go on, and there are 3; give more"),
        (["sweep.prune=asha", "train.eval_every=0"], "compares evaluations, and train.eval_every=0 turns them off"),
        (["sweep.prune=median", "checkpoint=off"], "sweep.prune=median needs checkpoints to go on from"),
        (["sweep.prune=median", "train.until=3"], "sweep.prune=median sets train.until of its trials; leave it out"),
        (
            ["sweep.prune=none,asha"],
            "sweep.prune=asha is none in another trial; sweep.prune belongs to the",
        ),
        (["job=describe", "sweep.parallel=2"], "sweep.parallel=2 is for jobs that keep each trial in a folder"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused_before_a_trial_starts(
    words: list[str], message: str, capsys: Capture, elsewhere: Path
) -> None:
    given = [word for word in PAPER if not word.startswith(tuple(f"{word.split('=')[0]}=" for word in words))]
    given = [word for word in given if not words[0].startswith("launcher=") or not word.startswith("launcher")]
    assert main([*given, *words, "seed=1,2,3"]) == Exit.CONFIG
    assert message in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_options_of_a_sweep_are_refused_in_a_single_run(capsys: Capture, elsewhere: Path) -> None:
    words = [word for word in TWO if word != "-m" and word != "job=paper"]
    assert main(words) == Exit.CONFIG
    assert "sweep.parallel=2 is of a sweep, and this is one run; add -m, or leave sweep.parallel out" in (
        capsys.readouterr().err
    )


def test_trials_of_other_lengths_are_not_compared(capsys: Capture, elsewhere: Path) -> None:
    words = [word for word in PAPER if word != "train.epochs=9"]
    assert main([*words, "sweep.prune=asha", "train.epochs=9,12", "seed=1,2,3"]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert "trial 4 has 12 and others have 9; give all the same train.epochs" in err
    assert out.splitlines()[-1].startswith("dtf: 2 of 6 trials finished, 1 pruned")
    assert main([*words, "run.dir=short", "sweep.prune=asha", "train.epochs=2", "seed=1,2,3"]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert "needs 3 (sweep.factor) to 4096 evaluations in a trial, trial 1 has 2; change train.eval_every" in err
    assert "trial 2: not begun" in out


def test_gpus_are_divided_and_refused_where_they_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 5)

    def share(slot: int, count: int, **launcher: object) -> str:
        return slots.share_of_devices(
            {"name": "local", "devices": "auto", "processes": "auto", **launcher}, slot, count
        )

    assert [share(slot, 2) for slot in range(2)] == ["0,1", "2,3"]
    assert [share(slot, 5) for slot in range(5)] == ["0", "1", "2", "3", "4"]
    assert share(1, 2, devices="4,2,0", processes=1) == "2"
    assert share(1, 2, devices="cpu", processes=3) == "cpu"
    with pytest.raises(ConfigError, match="sweep.parallel=2 needs 6 GPUs, 3 for each trial, there are 5; lower"):
        share(0, 2, processes=3)
    with pytest.raises(ConfigError, match="sweep.parallel=6 needs 6 GPUs, one for each trial, there are 5"):
        share(0, 6)


def test_a_quota_smaller_than_the_cores_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(devices, "_core_of", lambda number: (0, number))
    monkeypatch.setattr(devices, "cores", lambda: 8)
    assert slots.share_of_cores(3) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    monkeypatch.setattr(devices, "cores", lambda: 4)
    assert slots.share_of_cores(2) == [[0, 1], [4, 5]]
    with pytest.raises(ConfigError, match="sweep.parallel=5 needs a core for each trial, there are 4; use"):
        slots.share_of_cores(5)


@needs_two_cores
@pytest.mark.slow
def test_optuna_with_two_in_flight_is_told_of_both_and_goes_on_after_a_stop(capsys: Capture, elsewhere: Path) -> None:
    pytest.importorskip("optuna")
    words = [*TWO, "hydra/sweeper=optuna", "lr.peak=tag(log,interval(0.001,10))", "sweep.prune=asha"]
    assert main([*words, "hydra.sweeper.n_trials=9"]) == Exit.OK
    first = json.loads((elsewhere / "home/proposals.json").read_text())
    assert first["news"][0] == {} and any(
        {"value": None, "evaluations": None} in news.values() for news in first["news"]
    )
    assert any(told["evaluations"] == 1 for news in first["news"] for told in news.values() if told)
    finished = re.search(r"(\d) of 9 trials finished, (\d) pruned", capsys.readouterr().out)
    assert finished and int(finished[1]) >= 1 and int(finished[1]) + int(finished[2]) == 9
    assert main([*words, "hydra.sweeper.n_trials=12"]) == Exit.OK
    again = json.loads((elsewhere / "home/proposals.json").read_text())
    assert again["proposals"][:9] == first["proposals"] and len(again["proposals"]) == 12
    assert "of 12 trials finished" in capsys.readouterr().out


@needs_two_cores
@pytest.mark.slow
def test_trials_at_once_pay_for_their_share_of_the_machine(capsys: Capture, elsewhere: Path) -> None:
    """The budget is that of all that run together: each counts the seconds of the others too."""
    long = [word for word in HOLDING if not word.startswith(("train.steps", "train.eval", "checkpoint.every"))]
    words = [*long, "recipe.hold=none", "lr.peak=0.1,0.2", "train.steps=1000000", "train.eval_every=0"]
    words += ["checkpoint.every_steps=1000000", "budget.cost_per_hour=7200"]
    assert main([*words, "budget.cost=6"]) == Exit.BUDGET
    out, err = capsys.readouterr()
    assert out.count("E_BUDGET") >= 2 and "the sweep stops here" in err
    spent = sum(spent_s(folder) for folder in (elsewhere / "home").iterdir())
    assert spent >= 6, "a dollar a second for each of them"
    assert all(
        yaml.safe_load(path.read_text())["budget"]["cost_per_hour"] == 3600
        for path in (elsewhere / "home").glob("*/config.yaml")
    )
    assert float(out.splitlines()[-1].partition("at a cost of ")[2].split(",")[0]) == pytest.approx(spent, rel=0.1)


def test_a_scheduler_gets_a_sweep_as_one_job_and_nothing_is_kept_of_a_dry_run(capsys: Capture, elsewhere: Path) -> None:
    words = ["-m", "launcher=slurm", "launcher.dry_run=true", "train.steps=2", "seed=1,2,3"]
    assert main([*words, "sweep.parallel=2"]) == Exit.OK
    assert "#SBATCH --array=0-2%2\n" in capsys.readouterr().out
    assert main([*words, "sweep.prune=asha", "train.eval_every=1", "sweep.factor=2"]) == Exit.OK
    out = capsys.readouterr().out
    assert "--array" not in out and "#SBATCH" in out, "a job for each trial, this is the first"
    assert not list(elsewhere.iterdir())


@pytest.mark.slow
def test_trials_that_are_decided_as_they_go_are_jobs_of_a_scheduler(capsys: Capture, elsewhere: Path) -> None:
    """The scheduler runs processes on this host; what they have come to is read from their folders."""
    words = [word for word in PAPER if not word.startswith(("launcher", "plugins"))]
    words += ["plugins=[tests.support.paper_runs,tests.support.toy,tests.support.here]", "launcher=here"]
    words += ["launcher.devices=cpu", "sweep.prune=asha", "sweep.parallel=2", "lr.peak=0.01,0.1,1"]
    assert main(words) == Exit.OK
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("dtf: 1 of 3 trials finished, 2 pruned, the best is trial 2, "), out
    assert main(words) == Exit.OK
    assert "it was finished before" in capsys.readouterr().out
