"""The first table of a report: what each run came to."""

from __future__ import annotations

from pathlib import Path

from dtf.runs import report, results
from tests.unit.test_report import run_folder


def test_a_run_is_judged_by_its_last_evaluation(tmp_path: Path) -> None:
    """The loss is 0.9 after the first epoch and 0.45 after the second."""
    text = report.html(results.read_runs([str(run_folder(tmp_path / "a"))]), [], "now")
    assert "0.4500" in text and "0.9000" not in text
