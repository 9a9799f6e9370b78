"""The first table of a report: what each run came to."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dtf.runs import report, results
from dtf.runs.run_folder import take_lock
from tests.unit.test_report import run_folder


def test_a_run_is_judged_by_its_last_evaluation(tmp_path: Path) -> None:
    """The loss is 0.9 after the first epoch and 0.45 after the second."""
    text = report.html(results.read_runs([str(run_folder(tmp_path / "a"))]), [], "now")
    assert "0.4500" in text and "0.9000" not in text


def test_a_run_that_ends_while_a_report_is_made_is_running_in_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"exit": None, "ended": None}))
    lock = take_lock(folder)
    (run,) = results.read_runs([str(folder)])
    os.close(lock)
    assert run.state == "running"
    assert results.read_runs([str(folder)])[0].state == "under way, or killed"
