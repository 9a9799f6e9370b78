"""The folder of a sweep: `job=status` and `job=cancel` of one that decides as it goes; and what its slots are sent."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from dtf.cli.main import main
from dtf.cli.slots import receive_order, send_order
from dtf.core.errors import Exit
from dtf.jobs import cancel
from dtf.runs.run_folder import take_lock
from dtf.runs.sweep_record import SweepRecord


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


def test_a_sweep_that_lives_is_told_to_end_and_its_state_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(cancel.os, "kill", lambda *sent: signals.append(sent))
    record, lock = SweepRecord(home, {}), take_lock(home)
    try:
        assert main(["job=status", f"job.run_folder={home}", "job.format=json"]) == Exit.OK
        assert json.loads(capsys.readouterr().out) == {"sweep": {"state": "running"}}
        assert main(["job=cancel", f"job.run_folder={home}"]) == Exit.OK
        assert signals == [(os.getpid(), signal.SIGTERM)]
    finally:
        os.close(lock)
    record.end(Exit.PREEMPTED)
    capsys.readouterr()
    assert main(["job=status", f"job.run_folder={home}"]) == Exit.OK
    assert capsys.readouterr().out == "sweep: ended with E_PREEMPTED\n"
    assert main(["job=cancel", f"job.run_folder={home}"]) == Exit.OK
    assert "nothing to end" in capsys.readouterr().out
    assert len(signals) == 1


def test_the_jobs_that_a_killed_sweep_has_left_are_cancelled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SweepRecord(home, {})
    for name in ("a", "b"):
        (home / name).mkdir()
    asked: list[str] = []
    monkeypatch.setattr(cancel, "_cancel_job", lambda folder: bool(asked.append(folder.name)))
    assert main(["job=cancel", f"job.run_folder={home}"]) == Exit.OK
    assert asked == ["sweep", "a", "b"]


def test_a_slot_is_sent_a_config_of_any_length() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with ours:
            for length in (1, 400_000, 2):
                send_order(ours, {"config": "x" * length})
                assert receive_order(theirs) == {"config": "x" * length}
        assert receive_order(theirs) is None
