"""The folder of a sweep: `job=status` and `job=cancel` of one that decides as it goes; and what its slots are sent."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from pathlib import Path

import pytest

from dtf.cli.main import main
from dtf.cli.slots import receive_order, send_order, shown
from dtf.cli.trials import find as find_trial
from dtf.cluster.record import Intent, find, keep_intent
from dtf.core.errors import BusyError, DataError, Exit
from dtf.jobs import cancel
from dtf.runs.results import Result, best_trials, read_runs
from dtf.runs.run_folder import take_lock
from dtf.runs.sweep_record import SweepRecord, pruned


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
    # a kill while one was submitted leaves an intent, which is refused by name after the others were asked
    (home / "a" / "job").mkdir()
    keep_intent(home / "a", Intent("sweep-1", "d", "t", 1.0))
    monkeypatch.setattr(cancel, "_cancel_job", lambda folder: bool(asked.append(folder.name) or find(folder)))
    assert main(["job=cancel", f"job.run_folder={home}"]) == Exit.BUSY
    assert asked[3:] == ["sweep", "a", "b"]


def test_a_line_of_a_trial_is_told_by_its_number_and_measurements_take_one_row_of_a_terminal() -> None:
    measured, error = f"eval step=20/40 {'top1=0.5 ' * 20}", f"dtf: error[E_DATA]: {'x' * 200}"
    assert shown("trial 1: ", measured, 0) == f"trial 1: {measured}"
    cut = shown("trial 1: ", measured, 80)
    assert len(cut) == 80 and cut.startswith("trial 1: eval step=20/40 ") and cut.endswith("...")
    assert shown("trial 1: ", error, 80) == f"trial 1: {error}"
    assert shown("trial 1: ", "\r 10 %\r100 %\r", 80) == "trial 1: 100 %"


def test_the_best_trial_of_a_sweep_is_told_while_others_run_or_have_failed(home: Path) -> None:
    def result(name: str, exit: int | None, *values: float) -> Result:
        record = {"exit": exit, "cause": "finished", "objective": "loss", "id": "1"}
        record["evaluations"] = {str(step): value for step, value in enumerate(values)}
        return Result(home / name, {}, record, [], [], [])

    results = [result("a", Exit.OK, 0.5, 0.3), result("b", None, 0.2, math.nan, 0.4), result("c", Exit.DIVERGED, 0.1)]
    assert not list(best_trials(results))
    SweepRecord(home, {}, ("loss", "min"))
    assert list(best_trials(results)) == ["best trial of sweep: b  loss=0.2000  under way, or killed"]
    SweepRecord(home, {}, ("loss", "max"))
    assert list(best_trials(results)) == ["best trial of sweep: a  loss=0.5000  finished"]
    assert list(best_trials(results[2:])) == []


def test_a_slot_is_sent_a_config_of_any_length() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with ours:
            for length in (1, 400_000, 2):
                send_order(ours, {"config": "x" * length})
                assert receive_order(theirs) == {"config": "x" * length}
        assert receive_order(theirs) is None


ALIASES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("record", "config"),
    [
        ({"best": 5}, "lr: 1"),
        ({"best": {"loss": 1}}, "lr: 1"),
        ({"evaluations": [1]}, "lr: 1"),
        ({"evaluations": {"x": 1}}, "lr: 1"),
        ({"plan": "all"}, "lr: 1"),
        ({"plan": {"steps": math.inf, "steps_per_epoch": 1}}, "lr: 1"),
        ({}, ALIASES),  # 2 ** 39 leaves
        ({}, "lr: [" * 10_000),
    ],
)
def test_a_trial_that_no_run_has_written_is_refused_by_name(home: Path, record: dict, config: str) -> None:
    (home / "run.json").write_text(json.dumps({"id": "1", "exit": 0, "cause": "finished", "identity": {}} | record))
    (home / "config.yaml").write_text(config)
    with pytest.raises(BusyError, match=r"sweep holds what is no trial \(.*\); choose another run.dir"):
        find_trial(home, {"lr": 1})
    with pytest.raises(DataError, match="sweep cannot be read"):
        read_runs([str(home)])


def test_a_sweep_json_that_no_sweep_has_written_is_refused_by_name(home: Path) -> None:
    for text in ('{"pruned": {"a": 1e999}}', '{"pruned": 7}', "[" * 100_000):
        (home / "sweep.json").write_text(text)
        with pytest.raises(DataError, match="sweep.json cannot be read .*; remove it"):
            pruned(home)
