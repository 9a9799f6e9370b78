"""`-m`: options with keys of their own, errors that name the trial, and the table."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.cli.main import main
from dtf.cli.sweep import _StopRequests
from dtf.cli.trials import NOT_STARTED, Trial, folder_name, table
from dtf.core.errors import Exit
from dtf.host.scratch import LOCK

SHOW = ("plugins=[tests.support.own_parts]", "job=front_show")
SMALL = [
    "plugins=[tests.support.toy]",
    "recipe=toy",
    "launcher=inline",
    "launcher.devices=cpu",
    "strategy=dp",
    "strategy.replicas=1",
    "step.batch_size=48",
]

MIRROR = ["observer=[jsonl]", "checkpoint.mirror=mirror"]

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def configs(tmp_path: Path) -> Callable[..., list[dict]]:
    """Run a sweep that must succeed; the config of each trial."""

    def run(*words: str) -> list[dict]:
        log = tmp_path / "log"
        assert main(["-m", *SHOW, f"job.file={log}", *words]) == Exit.OK
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_keys_that_only_the_options_swept_over_have(configs) -> None:
    seen = configs("lr=step,constant", "lr.warmup=5")
    assert [(one["lr"]["name"], one["lr"]["warmup"]) for one in seen] == [("step", 5), ("constant", 5)]


def test_the_scratch_folder_of_a_killed_sweep_goes_with_the_next(
    configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dtf-sweep-killed").mkdir()
    (tmp_path / "dtf-sweep-killed" / LOCK).touch()
    configs("seed=1,2")
    assert not list(tmp_path.glob("dtf-sweep-*"))


def test_keys_of_options_that_the_experiments_swept_over_choose(configs, tmp_path: Path) -> None:
    folder = tmp_path / "my" / "experiment"
    folder.mkdir(parents=True)
    for name in ("long", "short"):
        (folder / f"{name}.yaml").write_text("# @package _global_\ndefaults:\n  - override /recipe: front_toy\n")
    seen = configs("--config-dir", str(folder.parent), "experiment=long,short", "recipe.data.root=/x")
    assert [one["recipe"]["data"]["root"] for one in seen] == ["/x", "/x"]


@pytest.mark.slow
def test_new_entries_of_mappings_and_deletions_as_in_a_single_run(configs) -> None:
    seen = configs(
        "launcher.env.A=1",
        "~observer.console",
        "~experiment",
        "hydra.sweeper.max_batch_size=7",
        "run.name=n${hydra:sweeper.max_batch_size}",
        "seed=1,2",
    )
    assert [(one["seed"], one["launcher"]["env"], sorted(one["observer"]), one["run"]["name"]) for one in seen] == [
        (1, {"A": "1"}, ["jsonl", "tensorboard"], "n7"),
        (2, {"A": "1"}, ["jsonl", "tensorboard"], "n7"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["lr=cosine,constant", "lr.floor=0.1"],
            "trial 2 of 2 (lr=constant): lr.floor=0.1 is no known key; it is a key of lr=cosine; choices: peak, "
            "warmup (lr.floor was set on the command line)",
        ),
        (
            ["seed=1,2", "lr.peak=0.1,abc"],
            "trial 2 of 4 (seed=1 lr.peak=abc): lr.peak=abc is not of type float (lr.peak was set on the command line)",
        ),
        (["seed=1,2", "~observer"], "trial 1 of 2 (seed=1): ~observer takes no observer away; "),
        (["seed=1", "sed=2"], "sed=2 is no known key; did you mean seed?"),
        (
            ["hydra.verbose=true,false"],
            "hydra.verbose=true,false sweeps over a setting of Hydra; give it one value "
            "(hydra.verbose was set on the command line)",
        ),
        (["lr.peak=interval(0.1,0.2)"], "an interval has no list of values to run; list them, "),
    ],
)
def test_errors_name_the_trial(capsys: Capture, words: list[str], message: str) -> None:
    assert main(["-m", *SHOW, *words]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert err.startswith(f"dtf: error[E_CONFIG]: {message}")
    assert not out


def test_the_table_of_a_sweep_says_where_each_run_is_and_how_good(capsys: Capture, elsewhere: Path) -> None:
    assert main(["-m", *SMALL, "train.steps=4", "train.eval_every=2", *MIRROR, "seed=1,2,3"]) == Exit.OK
    *lines, total = capsys.readouterr().out.splitlines()[-4:]
    (mirror,) = (elsewhere / "mirror").iterdir()  # of this sweep
    assert mirror.name.startswith("sweep-") and sorted(path.name for path in mirror.iterdir()) == [
        "seed=1",
        "seed=2",
        "seed=3",
    ]
    values = []
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(
            rf"dtf: trial {number}: finished  top1=(\S+)  (outputs/toy/sweep-\w{{8}}/seed={number})",
            line,
        )
        assert found, line
        measured = [json.loads(text) for text in (elsewhere / found[2] / "metrics.jsonl").read_text().splitlines()]
        values.append(max(one["top1"] for one in measured if one["split"] == "eval"))
        assert float(found[1]) == pytest.approx(values[-1], abs=1e-4)
    assert len(values) == 3 and re.fullmatch(
        r"dtf: 3 of 3 trials finished, the best is trial (\d), \d\d:\d\d in all, in outputs/toy/sweep-\w{8}", total
    )
    assert values[int(total.split("trial ")[1][0]) - 1] == max(values)
    assert main(["-m", *SMALL, "train.steps=4", "train.eval_every=2", *MIRROR, "seed=1,2,3"]) == Exit.OK
    assert capsys.readouterr().out.count("it was finished before") == 3, "mirrors of trials are their own"


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_trial_that_its_config_alone_forbids_is_named_before_any_begins(
    parallel: int, capsys: Capture, elsewhere: Path
) -> None:
    words = ["-m", *SMALL, "train.steps=2", f"sweep.parallel={parallel}", "step.micro_batch_rows=8,16,96"]
    assert main(words) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert "trial 3 of 3 (step.micro_batch_rows=96): step.micro_batch_rows=96 must be 0 to step.batch_size=48" in err
    assert not out and not list(elsewhere.iterdir())


def test_a_trial_that_fails_stops_no_other_and_is_named(capsys: Capture, elsewhere: Path) -> None:
    words = ["train.steps=2", "observer=[]", "train.log_every=1", "recipe.bad_row=3,-1"]
    assert main(["-m", *SMALL, *words]) == Exit.DIVERGED
    out, err = capsys.readouterr()
    failed, fine, _ = out.splitlines()[-3:]
    assert failed.startswith("dtf: trial 1: failed, E_DIVERGED ") and fine.startswith("dtf: trial 2: finished ")
    assert err.splitlines()[-1].startswith("dtf: 1 of 2 trials failed: recipe.bad_row=3 (E_DIVERGED); ")
    assert (elsewhere / failed.split()[-1] / "run.json").is_file()


def test_a_table_says_what_a_name_of_a_folder_cannot(elsewhere: Path) -> None:
    odd = Trial(
        title="recipe.data.root='/a b'",
        code=0,
        folder=elsewhere / "outputs" / "x" / folder_name(["recipe.data.root='/a b'"]),
        best=("top1", 0.5),
    )
    lines = list(table([odd, Trial(title="seed=1", code=3), Trial(title="seed=2", code=NOT_STARTED)]))
    assert re.fullmatch(
        r"dtf: trial 1: finished             top1=0.5000  outputs/x/recipe.data.root=__a_b_-\w{8}  "
        r"recipe.data.root='/a b'",
        lines[0],
    )
    assert lines[1:] == [
        "dtf: trial 2: failed, exit code 3               seed=1",
        "dtf: trial 3: not begun                         seed=2",
    ]


@settings(max_examples=40)
@given(st.lists(st.lists(st.text(max_size=60), max_size=4), min_size=2, max_size=2, unique_by=",".join))
def test_folders_of_trials_have_names_of_their_own_that_any_system_takes(both: list[list[str]]) -> None:
    names = [folder_name(words) for words in both]
    assert names[0] != names[1] or {",".join(words) for words in both} == {"", "trial"}
    assert all(re.fullmatch(r"[A-Za-z0-9_][\x20-\x7e]{0,99}", name) and "/" not in name for name in names) or names
    assert folder_name(["lr.peak=0.1", "strategy=dp"]) == "lr.peak=0.1,strategy=dp"


def test_a_request_to_stop_is_seen_beside_the_handler_of_its_signal() -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with _StopRequests() as requested:
            assert not requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert requested and requested, "once and for all"
    finally:
        signal.signal(signal.SIGTERM, before)
    with _StopRequests() as requested:
        assert not requested
