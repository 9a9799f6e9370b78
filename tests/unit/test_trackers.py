"""observer=wandb and mlflow: what the tracker has at the end is metrics.jsonl, after kills too.

The libraries are stand-ins (tests/support/tracker_stand_ins); tests/launch/test_real_trackers.py has the real ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Ended, Event, Failed, Measured, Note, Started
from dtf.observers import tracker, tracker_link
from dtf.observers.jsonl import Jsonl
from dtf.observers.wandb_observer import Wandb
from tests.support.launching import HANG_S
from tests.support.tracked_runs import (
    CONFIG,
    LAST,
    ROOT,
    STAND_INS,
    launch,
    make,
    measured,
    reports,
    rows,
    said,
    same,
)
from tests.unit.test_observers import started, train

pytestmark = pytest.mark.usefixtures("tracker_stand_ins")


def later(events: Iterable[Event], seconds: float) -> Iterator[Event]:
    for event in events:
        yield replace(event, seconds=event.seconds + seconds) if isinstance(event, Measured) else event


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("seed", range(2))
def test_a_tracker_has_metrics_jsonl_after_kills(name: str, seed: int, folder: Path) -> None:
    """Ranks die, the launching process is killed; redone steps have other times. The same run of the tracker has all
    of it, once.
    """
    chance, at, kept = random.Random(seed), 0, list[Measured]()  # by the last checkpoint
    for launches in range(3):
        observer, events = make(name), list[Event]()
        for attempt in range(2):
            reached = min(LAST, at + chance.randint(0, 7)) if launches < 2 or not attempt else LAST
            new = list(later(reports(at, reached), 100.0 * (2 * launches + attempt)))
            events += [Started(at, LAST, 8, {}, attempt, tuple(kept[-3:])), *new]
            at = reached - reached % 4
            kept += [event for event in new if isinstance(event, Measured) and event.step <= at]
        ends = launches == 2
        launch(folder, observer, [*events, *([Ended(LAST, "finished")] if ends else [])], 0 if ends else None)
    assert same(rows(name, folder), measured(folder)) and len(measured(folder)) == LAST + LAST // 2
    if name == "wandb":
        assert len({line["id"] for line in said(folder, "init")}) == 1


def test_a_run_that_may_go_on_holds_back_what_it_will_do_again(folder: Path) -> None:
    launch(folder, make("wandb"), [started(), *reports(0, 7), Failed(1, 7, 69, "lost", "")], Exit.PEER)
    assert max(rows("wandb", folder)) == ("train", 4)
    launch(folder, make("wandb"), [started(4), *reports(4, 7), Failed(1, 7, 79, "nan", "")], Exit.DIVERGED)
    assert same(rows("wandb", folder), measured(folder))


def test_a_tracker_that_is_chosen_later_gets_what_there_was(folder: Path) -> None:
    jsonl = Jsonl()
    jsonl.open(folder, CONFIG)
    for event in [started(), *reports(0, 8)]:
        jsonl.see(event)
    jsonl.close()
    launch(folder, make("wandb"), [started(8), *reports(8, 12), Ended(12, "finished")], 0)
    assert same(rows("wandb", folder), measured(folder)) and ("train", 1) in measured(folder)


def test_a_run_that_goes_on_waits_for_the_tracker_of_the_killed_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has still reports to take when the next launch begins."""
    monkeypatch.setenv("TRACKER_DOES", "slow@2")
    killed = make("wandb")
    launch(folder, killed, [started(), *reports(0, 8)], None, waits=False)
    monkeypatch.delenv("TRACKER_DOES")
    recent = tuple(event for event in reports(0, 8) if isinstance(event, Measured))
    again = [Started(8, LAST, 8, {}, 0, recent), *reports(8, LAST), Ended(LAST, "finished")]
    launch(folder, make("wandb"), again, 0)
    assert killed._link is not None
    killed._link._threads[1].join(HANG_S)
    assert same(rows("wandb", folder), measured(folder))
    assert said(folder, "finish")[-1]["code"] == 0, "the killed one does not have the last word"


def test_live_reports_come_at_once_and_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch(folder, make("wandb", live=True), [started(), *reports(0, 7)], None)
    assert max(rows("wandb", folder)) == ("train", 7)
    again = [started(4), *(event for event in reports(4, 8)), Ended(8, "finished")]
    launch(folder, make("wandb", live=True), again, 0)
    assert set(rows("wandb", folder)) == set(measured(folder))
    assert "it has the steps 5 to 7 already" in capsys.readouterr().err


def test_without_checkpoints_reports_come_at_once(folder: Path) -> None:
    config = CONFIG | {"checkpoint": {"every_steps": 0}}
    launch(folder, make("wandb"), [started(), train(1), train(2)], None, config)
    assert set(rows("wandb", folder)) == {("train", 1), ("train", 2)}


def test_more_reports_than_may_be_held_are_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that saves seldom. They come at once, and wait until the tracker takes them."""
    for module in (tracker, tracker_link):
        monkeypatch.setattr(module, "MOST_REPORTS", 10)
    reported = [train(step) for step in range(1, 12)]
    launch(folder, make("wandb"), [started(), *reported, Ended(11, "finished")], 0)
    assert len(rows("wandb", folder)) == 11


def test_config_notes_best_and_cause(folder: Path, tmp_path: Path) -> None:
    events = [
        Note("warning", "before the ranks were ready"),
        started(),
        *reports(0, 4),
        Note("warning", "rank 1 was killed; restart 1 of 3"),
        Note("info", "no warning"),
        Ended(4, "finished", {"top1": 0.95, "best_top1": 0.95, "best_step": 2.0}),
    ]
    for name in ("wandb", "mlflow"):
        launch(folder, make(name), events, 0)
    expected = "step 0: before the ranks were ready\nstep 4: rank 1 was killed; restart 1 of 3"
    assert said(folder, "notes")[-1]["text"] == expected
    assert said(folder, "config")[0]["recipe"] == CONFIG["recipe"]
    summary = {"what": "summary", "exit": 0, "cause": "finished", "best/top1": 0.95, "best/step": 2.0}
    assert said(folder, "summary") == [summary] and said(folder, "finish")[0]["code"] == 0
    assert said(folder, "init")[0]["project"] == "shapes" and said(folder, "init")[0]["name"] == "run"
    (run,) = json.loads((tmp_path / "store.json").read_text())["runs"].values()
    assert run["params"]["recipe.model.width"] == "8" and run["params"]["api_key"] == "***"
    assert run["tags"] == {
        "run_folder": str(folder),
        "mlflow.note.content": expected,
        "exit": "0",
        "cause": "finished",
    }
    assert ["best/top1", 0.95, 0, 2] in run["metrics"] and run["status"] == "FINISHED"


def test_another_config_of_a_run_that_goes_on_is_told(folder: Path, tmp_path: Path) -> None:
    launch(folder, make("mlflow"), [started(), *reports(0, 4)], None)
    launch(folder, make("mlflow"), [started(4), Ended(8, "finished")], 0, CONFIG | {"strategy": {"name": "fsdp"}})
    (run,) = json.loads((tmp_path / "store.json").read_text())["runs"].values()
    assert run["params"]["strategy.name"] == "ddp" and run["tags"]["now.strategy.name"] == "fsdp"


def test_trials_of_a_sweep_are_grouped(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep-1"
    for trial in ("lr.peak=1", "lr.peak=2"):
        (sweep / trial).mkdir(parents=True)
        (sweep / ".lock").touch()
        for name in ("wandb", "mlflow"):
            launch(sweep / trial, make(name), [started(), Ended(1, "finished")], 0)
        assert said(sweep / trial, "init")[0]["group"] == "sweep-1"
    runs = json.loads((tmp_path / "store.json").read_text())["runs"]
    parent, *trials = runs
    assert runs[parent]["name"] == "sweep-1"
    assert [runs[id]["tags"]["mlflow.parentRunId"] for id in trials] == [parent, parent]


# ---------------------------------------------------------------- before the ranks start


@pytest.mark.parametrize(("name", "needs"), [("wandb", "wandb>="), ("mlflow", "mlflow>=")])
def test_a_missing_library_is_refused_with_its_command(name: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"observer={name} needs the package {name}.*-m pip install '{needs}"):
        make(name).check()


def test_a_folder_of_its_runs_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(part for part in sys.path if "envs" not in part)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(Wandb, "package", "elsewhere")
    assert importlib.util.find_spec("elsewhere") is not None
    with pytest.raises(ConfigError, match="needs the package elsewhere"):
        make("wandb").check()


def test_a_password_in_the_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="tracking_uri holds a password.*MLFLOW_TRACKING_URI"):
        make("mlflow", tracking_uri="postgresql://me:secret@host/db").check()


def test_a_library_is_imported_only_where_it_was_chosen(tmp_path: Path) -> None:
    """Not by the command line, and not by the launching process either."""
    code = (
        "import sys, pathlib\n"
        "from dtf.config.compose import compose\n"
        "from dtf.api.observer import Observers\n"
        "from dtf.core.types import Started\n"
        "settings = compose(['observer=[jsonl,wandb,mlflow,prometheus]', 'train.steps=1']).check()\n"
        "observers = Observers({'wandb': settings.observer['wandb']})\n"
        f"observers.open(pathlib.Path({str(tmp_path)!r}), {CONFIG!r})\n"
        "observers.see(Started(0, 1, 1, {}))\n"
        "observers.close()\n"
        "print({'wandb', 'mlflow', 'http.server', 'torch'} & set(sys.modules))\n"
    )
    path = os.pathsep.join([str(STAND_INS), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr
    assert (tmp_path / "stand_in.jsonl").exists()
