"""The folder in which trials of `job=chaos` add up: whose it is, and what it holds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from dtf.core.errors import BusyError, Exit
from dtf.core.files import open_private
from dtf.jobs.chaos import results
from dtf.jobs.chaos.folder import trials_folder
from dtf.jobs.chaos.trial import Outcome
from dtf.runs.run_folder import take_lock


def test_a_folder_of_something_else_is_left_alone(run_dtf: Any, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    done = run_dtf("job=chaos", folder=tmp_path)
    assert done.code == Exit.CONFIG and "is not empty, and holds no trials" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_two_commands_do_not_work_in_one_folder(run_dtf: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("")
    lock = take_lock(tmp_path)
    done = run_dtf("job=chaos", folder=tmp_path)
    os.close(lock)
    assert done.code == Exit.BUSY and "is in use by a live run" in done.err, done.err


def test_a_config_can_be_corrected_until_there_is_a_trial(tmp_path: Path) -> None:
    place, lengths = tmp_path / "chaos", {"steps": 8}
    place.mkdir(mode=0o700)
    os.close(take_lock(place))  # of a command that was killed just then
    with trials_folder(place, {"lr": {"peak": 1}, "job": {"name": "chaos"}}, lengths):
        (place / "references").mkdir()
        open_private(place / "made", "w").close()
    with trials_folder(place, {"lr": {"peak": 2}, "job": {"name": "chaos"}}, lengths):
        assert not (place / "references").exists(), "of the config before"
        results.append(place / "trials.jsonl", Outcome(0, 0, "kill_rank", "ddp"))
        (place / "plain").write_text("")
    assert {path.stat().st_mode & 0o077 for path in [place, *place.iterdir()]} == {0}
    with trials_folder(place, {"lr": {"peak": 2}, "job": {}, "run": {"dir": "x"}}, lengths):
        pass
    named = re.escape("lr.peak=1, that of the trials there has 2")
    with pytest.raises(BusyError, match=named), trials_folder(place, {"lr": {"peak": 1}}, lengths):
        pass
    with pytest.raises(BusyError, match="job.steps=9"), trials_folder(place, {"lr": {"peak": 2}}, {"steps": 9}):
        pass


def test_half_a_line_of_a_killed_command_is_no_trial(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    results.append(path, Outcome(0, 0, "kill_rank", "ddp"))
    path.write_text(path.read_text() + '{"seed": 0, "numb')
    results.append(path, Outcome(0, 1, "kill_rank", "ddp"))
    assert [outcome.number for outcome in results.read(path)] == [0, 1]
