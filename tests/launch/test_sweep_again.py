"""The same sweep started again does what is missing: after a kill, an interrupt, a failure, with more values, and where
Optuna chooses them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtf.cli.main import main
from dtf.core.errors import Exit
from dtf.runs.run_folder import take_lock
from tests.support.blocked_recipe import HELD

ROOT = Path(__file__).parents[2]
INLINE = ["launcher=inline", "launcher.devices=cpu", "launcher.threads=1", "strategy=dp", "strategy.replicas=1"]
LOCAL = ["launcher=local", "launcher.devices=cpu", "launcher.threads=1", "launcher.processes=2", "strategy=ddp"]
TOY = [
    "plugins=[tests.support.toy]",
    "recipe=toy",
    *INLINE,
    "step.batch_size=48",
    "train.steps=4",
    "train.eval_every=2",
    "checkpoint=off",
    "observer=[]",
]

Capture = pytest.CaptureFixture[str]


def records(home: Path) -> dict[str, dict]:
    """run.json of every trial, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in home.glob("*/run.json")}


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        pytest.param(signal.SIGKILL, INLINE, id="kill", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, INLINE, id="interrupt", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, LOCAL, id="kill of ranks", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, LOCAL, id="interrupt of ranks", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_stopped_in_the_middle_runs_only_what_is_missing(
    number: int, launcher: list[str], capsys: Capture, elsewhere: Path
) -> None:
    hold = elsewhere / "hold"
    hold.touch()
    # behind the first checkpoint; before ranks first ask each other whether to stop
    epoch = 3 if number == signal.SIGKILL else 1
    lengths = [
        "step.batch_size=48",
        "train.steps=12",
        "train.eval_every=4",
        "train.log_every=0",
        "checkpoint.every_steps=4",
    ]
    words = [
        "-m",
        "plugins=[tests.support.blocked_recipe]",
        "recipe=holding",
        f"recipe.hold={hold}",
        f"recipe.epoch={epoch}",
        *launcher,
        *lengths,
        "observer=[console]",
        "seed=1,3,4",
    ]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "dtf", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # a shell that runs the tests in its background has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        saved = f"outputs/holding/*/seed={HELD}/checkpoints/step_000004"
        while not (elsewhere / "hold.reached").exists() or (number == signal.SIGKILL and not [*elsewhere.glob(saved)]):
            assert sweep.poll() is None, sweep.communicate()[0]
            time.sleep(0.02)
        sweep.send_signal(number)
        if number == signal.SIGKILL:
            sweep.wait()
    finally:
        hold.unlink()
        said = sweep.communicate()[0].decode()
    assert sweep.returncode == (-signal.SIGKILL if number == signal.SIGKILL else Exit.PREEMPTED), said
    assert number == signal.SIGKILL or (said.count("not begun"), said.count("stopped, goes on")) == (1, 1), said
    (home,) = (elsewhere / "outputs" / "holding").iterdir()
    before = records(home)
    assert sorted(before) == [f"seed={seed}" for seed in (1, HELD)]

    assert main(words) == Exit.OK
    after, out = records(home), capsys.readouterr().out
    assert sorted(after) == [f"seed={seed}" for seed in (1, HELD, 4)]
    assert after["seed=1"] == before["seed=1"]
    starts = [int(step) for step in re.findall(r"^started step=(\d+)/12", out, re.MULTILINE)]
    assert len(starts) == 2 and starts[0] > 0 and starts[1] == 0, "the second goes on, the third begins"
    assert len(re.findall(r"^dtf: trial \d: finished before ", out, re.MULTILINE)) == 1
    assert len(after[f"seed={HELD}"]["earlier"]) == 1 and all(record["exit"] == Exit.OK for record in after.values())
    assert "dtf: 3 of 3 trials finished" in out


@pytest.mark.slow
def test_a_folder_of_ones_own_takes_more_values_and_longer_trials_but_no_other_config(
    capsys: Capture, elsewhere: Path
) -> None:
    words = ["-m", *TOY, "run.dir=mine"]
    assert main([*words, "lr.peak=0.1,0.2"]) == Exit.OK
    assert main([*words, "lr.peak=0.1,0.2,0.3", "observer=[jsonl]", "launcher.threads=2"]) == Exit.OK
    assert capsys.readouterr().out.count("it was finished before") == 2
    assert sorted(records(elsewhere / "mine")) == ["lr.peak=0.1", "lr.peak=0.2", "lr.peak=0.3"]
    assert main([*words, "lr.peak=0.1,0.2", "train.steps=6"]) == Exit.OK
    assert "finished before" not in capsys.readouterr().out
    assert [len(record.get("earlier", [])) for record in records(elsewhere / "mine").values()].count(1) == 2
    assert main([*words, "lr.peak=0.1,0.4", "optimizer.momentum=0.5"]) == Exit.BUSY, "the other trial runs"
    out, err = capsys.readouterr()
    assert (
        "lr.peak=0.1 holds a trial with optimizer.momentum=0.9, this one has optimizer.momentum=0.5; choose another "
        "run.dir" in err
    )
    assert "dtf: trial 2: finished" in out


def test_what_failed_is_tried_again(capsys: Capture, elsewhere: Path) -> None:
    words = ["-m", *TOY, "train.log_every=1", "recipe.bad_row=3,-1", "run.dir=mine"]
    assert main(words) == Exit.DIVERGED
    assert main([*words, "train.skip_nonfinite=9"]) == Exit.OK, "only the length and such of train.* differ"
    assert len(records(elsewhere / "mine")["recipe.bad_row=3"]["earlier"]) == 1
    assert "dtf: trial 1: finished " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.name=a,b"], "run.name=b is a in another trial; run.name belongs to the whole sweep, give one value"),
        (["seed=1,2", "run.dir=x${seed}"], "run.dir=x2 is x1 in another trial"),
        (["budget.hours=1,2"], "budget.hours=2.0 is 1.0 in another trial"),
        (
            ["launcher=env", "seed=1,2"],
            "launcher=env takes part as a rank that others started, for one run; a sweep starts its own ranks",
        ),
    ],
)
def test_what_belongs_to_the_sweep_is_one_for_all_its_trials(
    words: list[str], message: str, capsys: Capture, elsewhere: Path
) -> None:
    given = [word for word in TOY if not (word.startswith("launcher") and "launcher=env" in words)]
    assert main(["-m", *given, *words]) == Exit.CONFIG
    assert message in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_a_sweep_keeps_its_folder_to_itself(capsys: Capture, elsewhere: Path) -> None:
    (elsewhere / "one").mkdir()
    (elsewhere / "one" / "run.json").touch()
    assert main(["-m", *TOY, "seed=1,2", "run.dir=one"]) == Exit.BUSY
    assert "is the folder of one run, a sweep needs one of its own" in capsys.readouterr().err
    (elsewhere / "two").mkdir()
    lock = take_lock(elsewhere / "two")
    assert main(["-m", *TOY, "seed=1,2", "run.dir=two"]) == Exit.BUSY
    assert f"in use by a live run (process {os.getpid()} on " in capsys.readouterr().err
    os.close(lock)


@pytest.mark.slow
def test_eight_trials_of_optuna_improve_the_objective_and_more_go_on(capsys: Capture, elsewhere: Path) -> None:
    words = [
        "-m",
        *TOY,
        "train.steps=24",
        "train.eval_every=24",
        "hydra/sweeper=optuna",
        "lr.peak=tag(log,interval(0.0001,0.3))",
        "run.objective=loss",
    ]
    assert main([*words, "hydra.sweeper.n_trials=8"]) == Exit.OK
    out = capsys.readouterr().out
    losses = [float(value) for value in re.findall(r"^dtf: trial \d: finished  loss=(\S+)", out, re.MULTILINE)]
    assert len(losses) == 8
    assert min(losses[2:]) < min(losses[:2]), "the first two are drawn at random"
    assert f"the best is trial {losses.index(min(losses)) + 1}," in out
    assert main([*words, "hydra.sweeper.n_trials=9"]) == Exit.OK
    out = capsys.readouterr().out
    assert out.count("it was finished before") == 8 and "dtf: 9 of 9 trials finished" in out


def test_optuna_needs_something_to_aim_at(capsys: Capture) -> None:
    assert main(["-m", *TOY, "hydra/sweeper=optuna", "lr.peak=interval(0.1,1)", "train.eval_every=0"]) == Exit.CONFIG
    assert "hydra/sweeper=optuna needs an objective" in capsys.readouterr().err
    assert main(["-m", *TOY, "hydra/sweeper=optuna", "step.batch_size=interval(8,64)"]) == Exit.CONFIG
    assert "step.batch_size=8.0 is not of type int" in capsys.readouterr().err
    assert main(["-m", *TOY, "hydra/sweeper=optuna", "seed=1"]) == Exit.CONFIG
    assert "has nothing to choose" in capsys.readouterr().err
