"""`job=relay`: one run under one strategy after the other has the numbers of a run under one, whoever is killed on the
way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dtf.core.errors import INTERRUPTED, Exit
from dtf.core.types import Measured, Note, Started
from dtf.jobs.fault_injection import KillTrigger

RELAY = ["job=relay", "step.batch_size=14", "lr.peak=0.02", "job.steps=8", "job.save_every=3", "job.eval_rows=24"]
SMALL = [*RELAY, "recipe=resnet_shapes", "recipe.data.pixels=8"]
TOY = [*RELAY, "plugins=[tests.support.toy]", "recipe=toy", "recipe.rows=98"]  # whole batches


def legs(*texts: str) -> str:
    return "job.legs=[" + ",".join(f"'{text}'" for text in texts) + "]"


def test_three_segments_and_a_killed_rank_are_one_run(run_dtf: Any, tmp_path: Path) -> None:
    done = run_dtf(
        *TOY,
        legs("dp processes=2 steps=4", "fsdp processes=2 kill=rank steps=12", "pserver processes=2 servers=1 steps=4"),
    )
    assert done.code == 0, done.err + done.out
    report = json.loads((done.folder / "relay.json").read_text())
    assert report["ok"] and report["tensor"] <= 1e-10 and len(report["tensors"]) > 20
    assert [(segment["first"], segment["last"], segment["world"]) for segment in report["legs"]] == [
        (0, 4, "1 process, 2 replicas"),
        (4, 16, "2 processes"),
        (16, 20, "1 server, 2 trainers"),
    ]
    killed = report["legs"][1]["killed"]
    assert (
        re.fullmatch(r"rank [01]", killed["who"])
        and 4 <= killed["again"] < killed["at"] < 16
        and killed["again"] in (4, 6, 9, 12, 15)
    )
    assert [row["step"] for row in report["steps"]] == list(range(1, 21)) and report["samples"] == 20 * 14
    assert "the same ones in the same order as the reference" in done.out and "1 kill" in done.out
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert sorted(path.name for path in done.folder.iterdir()) == ["relay.json", *["relay.png"] * drawn]
    if drawn:
        from docs import pictures

        assert pictures.main(["relay", str(out := tmp_path / "again.png"), str(done.folder)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "wrong_scale processes=2",
            r"BREAK, under wrong_scale \(2 processes\): grad_norm at step 4: .* 2 x the reference's",
            marks=pytest.mark.slow,  # what is compared is what job=verify compares
        ),
        ("forgetful processes=2", r"BREAK, under forgetful \(2 processes\): loss at step 5: "),
    ],
)
def test_a_segment_that_breaks_the_law_is_named(
    run_dtf: Any, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run_dtf(*SMALL, "plugins=[tests.support.broken_strategies]", legs("ddp steps=4", f"{fault} steps=3"))
    assert done.code == 1 and re.search(said, done.out), done.out + done.err
    assert not json.loads((done.folder / "relay.json").read_text())["ok"]
    assert "for the picture: " in done.out, "without matplotlib the text says it all"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("job.legs=[]", "job.legs=[] must hold at least one"),
        (legs("ddp", "nope"), "job.legs names 'nope'; choices: "),
        (legs("ddp processes=two"), "job.legs has 'ddp processes=two'; processes=two must be a whole number from 1 on"),
        (legs("ddp steps=0"), "job.legs has 'ddp steps=0'; steps=0 must be a whole number from 1 on"),
        (legs("ddp procesess=2"), "but procesess is no option of ddp; did you mean processes?"),
        (
            legs("ddp kill=server"),
            "job.legs has 'ddp kill=server', but kill=server names nobody; choices: launcher, rank, trainer",
        ),
        (legs("ddp kill=rank steps=3"), "no step between two saves to kill somebody at; use more steps"),
        (
            legs("ddp", "tensor processes=3 degree=2"),
            "job.legs has 'tensor processes=3 degree=2': strategy.degree=2 does not divide",
        ),
        ("job.reference='ddp steps=3'", "job.reference has 'ddp steps=3', but steps is no option of ddp"),
        ("launcher=inline", "launcher=inline has no ranks that job=relay could kill; use launcher=local"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(run_dtf: Any, override: str, words: str) -> None:
    done = run_dtf(*SMALL, legs("ddp"), override)
    assert done.code == 2 and words in done.err and not done.folder.exists(), done.err


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("dtf.jobs.relay._run_segment", signal.SIGTERM, Exit.PREEMPTED),
        pytest.param("dtf.runs.compare.RecordedRun.read", signal.SIGINT, INTERRUPTED, marks=pytest.mark.slow),
        pytest.param("dtf.jobs.relay._run_segment", signal.SIGINT, INTERRUPTED, marks=pytest.mark.slow),
        pytest.param("dtf.runs.compare.RecordedRun.read", signal.SIGTERM, Exit.PREEMPTED, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_no_ranks_run_leaves_nothing(
    run_dtf: Any, monkeypatch: pytest.MonkeyPatch, moment: str, number: int, code: int
) -> None:
    folders: list[Path] = []

    def go(segment: Any, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        folders.append(folder)

    def stop(*arguments: Any) -> None:
        if len(arguments) == 2:
            go(*arguments)
        os.kill(os.getpid(), number)

    monkeypatch.setattr("dtf.jobs.relay._run_segment", go)
    monkeypatch.setattr(moment, stop)
    done = run_dtf(*SMALL, legs("ddp"))
    assert done.code == code and folders and not list(done.folder.iterdir())
    if code == Exit.PREEMPTED:
        assert "start it again with another run.dir" in done.err
    (done.folder / "something").touch()
    again = run_dtf(*SMALL, legs("ddp"), folder=done.folder)
    assert again.code == Exit.CONFIG and "is not empty, and a relay is run from its start" in again.err


def measured(step: int) -> Measured:
    return Measured("train", step, 0.0, 0.0, {"loss": 1.0})


def test_a_trigger_kills_once_and_notes_from_where_the_run_goes_on() -> None:
    kills: list[int] = []
    trigger = KillTrigger(5, lambda: kills.append(1))
    for event in (Started(0, 9, 9, {}), measured(4), measured(5), measured(6)):
        trigger.see(event)
    assert trigger.record("rank 1") is None, "the run has not noticed it"
    for event in (
        Note("warning", "rank 1: killed by SIGKILL; restart 1 of 3"),
        Started(3, 9, 9, {}),
        measured(4),
        measured(5),
        measured(6),
        measured(7),
    ):
        trigger.see(event)
    killed = trigger.record("rank 1")
    assert kills == [1] and killed is not None and (killed.at, killed.again) == (6, 3)


def test_one_that_is_replaced_alone_costs_no_step() -> None:
    trigger = KillTrigger(2, lambda: None)
    for event in (
        measured(2),
        Note("warning", "rank 2 (trainer): killed by SIGKILL; it alone is started again, 1 of 3"),
        measured(3),
        measured(4),
    ):
        trigger.see(event)
    killed = trigger.record("trainer 1")
    assert killed is not None and (killed.at, killed.again) == (2, 2)


@pytest.mark.slow
def test_a_killed_launcher_a_server_and_a_trainer(run_dtf: Any) -> None:
    many = legs(
        "ddp processes=2 kill=launcher",
        "pserver processes=2 servers=2 kill=server",
        "pserver processes=2 kill=trainer",
        "zero1 processes=3",
    )
    done = run_dtf(*SMALL, "job.steps=14", many, "job.keep=true")
    assert done.code == 0, done.err + done.out
    killed = [segment.get("killed") for segment in json.loads((done.folder / "relay.json").read_text())["legs"]]
    assert [kill and kill["who"][:-2] for kill in killed] == ["the launch", "server", "trainer", None]
    assert killed[2]["at"] == killed[2]["again"], "a trainer holds nothing"
    assert {"relay", "reference"} <= {path.name for path in done.folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["resnet_shapes", "ctr_clicks_sparse"])
def test_the_whole_relay(run_dtf: Any, recipe: str) -> None:
    assert Path(__file__).parents[2].joinpath("conf/experiment/relay.yaml").is_file()
    done = run_dtf("experiment=relay", f"recipe={recipe}", *([] if recipe == "resnet_shapes" else ["lr.peak=0.002"]))
    assert done.code == 0, done.err + done.out
    report = json.loads((done.folder / "relay.json").read_text())
    assert len(report["legs"]) == 6 and sum("killed" in segment for segment in report["legs"]) == 3
