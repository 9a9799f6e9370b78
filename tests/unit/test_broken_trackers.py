"""A tracker that hangs, dies, raises or finds its disk full changes nothing in the run. What it may lack is told."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

import pytest

from dtf.core.types import Ended
from dtf.observers import tracker, tracker_link
from tests.support.launching import HANG_S
from tests.support.tracked_runs import (
    CONFIG,
    end,
    launch,
    make,
    reports,
    rows,
    steps,
)
from tests.unit.test_observers import lines, started, timeless, train

pytestmark = pytest.mark.usefixtures("tracker_stand_ins")


MISSING = "of the run may be missing there"


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


@pytest.mark.parametrize(("at", "lost"), [("open", "600"), ("2", "600"), ("end", "the end of the run")])
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
    rates = {"rows_per_s": 0, "model_flops_per_s": 0}
    assert [row | rates for row in with_it] == [row | rates for row in without]
    assert sorted(os.listdir(beside.folder / "checkpoints")) == sorted(os.listdir(plain.folder / "checkpoints"))
