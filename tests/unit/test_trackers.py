"""observer=wandb and mlflow: what the tracker has at the end is metrics.jsonl, and nothing it does reaches the run.

The libraries are stand-ins (tests/support/tracker_stand_ins), which hang, die and raise when asked to;
tests/launch/test_real_trackers.py has the real ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtf.api.observer import Observers
from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Ended, Event, Failed, Measured, Note, Saved, Started
from dtf.observers import tracker, tracker_link
from dtf.observers.jsonl import Jsonl
from dtf.observers.mlflow_observer import Mlflow
from dtf.observers.tracker import Tracker
from dtf.observers.wandb_observer import Wandb
from tests.support.launching import HANG_S
from tests.unit.test_observers import evaluation, lines, started, timeless, train

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "support" / "tracker_stand_ins"
CONFIG = {
    "recipe": {"name": "shapes", "model": {"width": 8}},
    "strategy": {"name": "ddp"},
    "checkpoint": {"every_steps": 4},
    "observer": {"jsonl": {"path": "metrics.jsonl"}},
    "api_key": "***",
}
LAST = 24


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.json'}")


def make(name: str, **options: Any) -> Tracker:
    return {"wandb": Wandb, "mlflow": Mlflow}[name](**{"close_timeout_s": HANG_S, **options})


def end(folder: Path, exit: int | None, cause: str = "finished") -> None:
    """What the launching process writes before observers are closed."""
    (folder / "run.json").write_text(json.dumps({"exit": exit, "cause": cause, "best": ["top1", 0.95]}))


def reports(first: int, last: int) -> Iterator[Event]:
    """A line each step, an evaluation each second, a save each fourth."""
    for step in range(first + 1, last + 1):
        yield train(step, float("nan") if step == 7 else None)
        if step % 2 == 0:
            yield evaluation(step)
        if step % 4 == 0:
            yield Saved(step, "", False, 0.0)


def launch(folder: Path, observer: Tracker, events: Iterable[Event], exit: int | None, config: dict = CONFIG) -> None:
    """One launching process; `exit` None: it is killed, and what it has in memory is gone."""
    observers = Observers({"jsonl": Jsonl(), "tracker": observer})
    observers.open(folder, config)
    for event in events:
        observers.see(event)
    if exit is None:
        link = observer._link
        assert link is not None
        link._inbox.put(None)  # its pipe closes
        link._threads[1].join(HANG_S)
        assert not link._threads[1].is_alive()
    else:
        end(folder, exit)
        observers.close()


def rows(name: str, folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """What the tracker has: (split, step) -> metric -> value. No value twice."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for key, value, step in _values(name, folder):
        split, _, metric = key.partition("/")
        if split != "best":
            assert metric not in found.setdefault((split, step), {}), f"{key} of step {step} is there twice"
            found[split, step][metric] = value
    return found


def _values(name: str, folder: Path) -> Iterator[tuple[str, float, int]]:
    if name == "mlflow":
        (run,) = json.loads((folder.parent / "store.json").read_text())["runs"].values()
        yield from ((key, value, step) for key, value, _, step in run["metrics"])
        return
    for line in said(folder, "row"):
        yield from ((key, value, line["step"]) for key, value in line.items() if "/" in key)


def said(folder: Path, what: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "stand_in.jsonl").read_text().splitlines()]
    return [line for line in found if line["what"] == what]


def measured(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """metrics.jsonl in the same form."""
    return {
        (row.pop("split"), row.pop("step")): {key: math.nan if value is None else value for key, value in row.items()}
        for row in lines(folder)
    }


def same(one: dict, other: dict) -> bool:
    return json.dumps(sorted(one.items()), default=str) == json.dumps(sorted(other.items()), default=str)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("seed", range(2))
def test_a_tracker_has_metrics_jsonl_after_kills(name: str, seed: int, folder: Path) -> None:
    """Ranks die, the launching process is killed; redone steps have other times. The same run of the tracker has all
    of it, once.
    """
    chance, at = random.Random(seed), 0
    for launches in range(3):
        observer, events = make(name), list[Event]()
        for attempt in range(2):
            reached = min(LAST, at + chance.randint(0, 7)) if launches < 2 or not attempt else LAST
            recent = tuple(event for event in reports(0, at) if isinstance(event, Measured))[-3:]
            events += [Started(at, LAST, 8, {}, attempt, recent), *reports(at, reached)]
            at = reached - reached % 4
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


# ---------------------------------------------------------------- a tracker that misbehaves

MISSING = "of the run may be missing there"


def steps(last: int) -> Iterator[Event]:
    yield started()
    yield from reports(0, last)
    yield Ended(last, "finished")


@pytest.mark.parametrize(
    ("does", "told", "arrives"),
    [
        ("raise@open", "RuntimeError: no such host; tried again with the next report, the run goes on", 0),
        ("raise@2", "RuntimeError: no such host; tried again with the next report, the run goes on", 1),
        ("raise@end", "RuntimeError: no such host; how the run ended is missing there, the run goes on", 40),
        ("raise_once@2", "RuntimeError: no such host; tried again with the next report, the run goes on", 40),
        ("full@2", "OSError: [Errno 28] No space left on device; tried again with the next report", 40),
        ("die@2", "its process was killed by SIGKILL; ", 1),
        ("exit@2", "its process ended with exit code 3, wandb.log may say why; ", 1),
        ("sys_exit@2", "its process ended with exit code 4, wandb.log may say why; ", 1),
        ("slow@2", "", 40),
    ],
)
def test_whatever_a_tracker_does_the_run_goes_on(
    does: str,
    told: str,
    arrives: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is lost is one line."""
    monkeypatch.setenv("TRACKER_DOES", does)
    launch(folder, make("wandb"), steps(40), 0)
    warnings = capsys.readouterr().err
    assert told in warnings and warnings.count(MISSING) == (arrives < 40 or "end" in does)
    assert len(lines(folder)) == 60
    there = rows("wandb", folder) if arrives else {}
    assert max((step for _, step in there), default=0) == arrives


@pytest.mark.parametrize(("at", "lost"), [("open", "600"), ("2", "600"), ("end", "")])
def test_a_tracker_that_hangs_stops_nothing_and_ends_with_all_it_has_started(
    at: str, lost: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`see` would not return if it waited: the run reports more than a pipe holds."""
    monkeypatch.setenv("TRACKER_DOES", f"hang@{at}")
    monkeypatch.chdir(folder)
    observer = make("wandb", close_timeout_s=0.0)
    observer.open(folder, CONFIG)
    for event in steps(400):
        observer.see(event)
    end(folder, 0)
    if at == "end":
        assert observer._link is not None
        observer._link.send({"do": "end", "exit": 0, "cause": "finished"})
    child = _when_written(folder / "hangs")
    observer.close()
    assert _ends(child)
    assert f"it was not done within 0 s; {lost}" in capsys.readouterr().err


def test_a_tracker_that_hangs_ends_soon_after_a_killed_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_DOES", "hang@2")
    monkeypatch.chdir(folder)
    observer = make("wandb", close_timeout_s=0.1)
    observer.open(folder, CONFIG)
    for event in steps(8):
        observer.see(event)
    child = _when_written(folder / "hangs")
    assert observer._link is not None
    observer._link._inbox.put(None)  # its pipe closes, as when its owner is killed
    assert _ends(child)


def _when_written(path: Path) -> int:
    """A descriptor of the process whose number a file holds."""
    for _ in range(int(HANG_S / 0.01)):
        with contextlib.suppress(OSError, ValueError):
            return os.pidfd_open(int(path.read_text()))
        threading.Event().wait(0.01)
    raise AssertionError(f"{path} was not written")


def _ends(process: int) -> bool:
    """Whether a process ends."""
    try:
        return bool(select.select([process], [], [], HANG_S)[0])
    finally:
        os.close(process)


def test_what_waits_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_link, "MOST_REPORTS", 100)
    monkeypatch.setattr(tracker, "MOST_REPORTS", 10)
    monkeypatch.setenv("TRACKER_DOES", "hang@2")
    monkeypatch.chdir(folder)
    observer = make("wandb", close_timeout_s=0.0)
    observer.open(folder, CONFIG)
    observer.see(started())
    for step in range(1, 1001):
        observer.see(train(step))
        assert len(observer._held) <= 10
    assert observer._link is not None and observer._link._inbox.qsize() <= 101
    end(folder, 0)
    observer.close()
    assert "it was not done within 0 s; " in capsys.readouterr().err


def test_a_run_that_was_asked_to_stop_waits_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "_ASKED_TO_STOP_S", 0.1)
    monkeypatch.setenv("TRACKER_DOES", "hang@2")
    monkeypatch.chdir(folder)
    launch(folder, make("wandb", close_timeout_s=3600.0), [started(), *reports(0, 8), Ended(8, "preempted")], 75)


@pytest.mark.parametrize("does", ["hang", "full"])
def test_a_run_beside_a_broken_tracker_is_the_run_without(does: str, run_dtf, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("plugins=[tests.support.toy]", "recipe=toy", "launcher.processes=1", "train.epochs=null", "train.steps=6")
    keys += ("train.log_every=1", "checkpoint.every_steps=2")
    plain = run_dtf(*keys, "observer=[jsonl]")
    monkeypatch.setenv("TRACKER_DOES", f"{does}@2")
    close = ("observer.wandb.close_timeout_s=0", "observer.mlflow.close_timeout_s=0") if does == "hang" else ()
    beside = run_dtf(*keys, "observer=[jsonl,mlflow,wandb]", *close)
    assert plain.code == beside.code == 0 and "observer.wandb" in beside.err and "observer.mlflow" in beside.err
    with_it, without = timeless(beside.folder), timeless(plain.folder)
    assert [row | {"rows_per_s": 0} for row in with_it] == [row | {"rows_per_s": 0} for row in without]
    assert sorted(os.listdir(beside.folder / "checkpoints")) == sorted(os.listdir(plain.folder / "checkpoints"))


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
        "print({'wandb', 'mlflow', 'prometheus_client', 'torch'} & set(sys.modules))\n"
    )
    path = os.pathsep.join([str(STAND_INS), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr
    assert (tmp_path / "stand_in.jsonl").exists()
