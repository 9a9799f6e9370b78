"""Seconds of the tests by folder, at the end of a run: what each folder took, and what it may take.

A folder over its budget is a line in the report, no failure: another machine may be three times slower. `--hold-budget`
makes it one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BUDGET_S = {
    "laws": 198.0,
    "launch": 80.0,
    "cluster": 28.0,
    "pserver": 31.0,
    "docs": 16.0,
    "unit": 124.0,
    "zoo": 10.0,
    "chains": 3.0,
    "planted": 1.0,
}
"""Both workers added up, less than four minutes each: the seconds that were measured, and 7 % of room."""


@dataclass
class Spent:
    seconds: float = 0.0
    tests: int = 0


@dataclass(eq=False)  # pytest keeps plugins in sets
class Budget:
    """A plugin of pytest. With workers, they measure and the process that started them adds up."""

    hold: bool
    folders: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    workers: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = Path(report.nodeid.split("::")[0]).parent.name
        for spent in (self.folders[folder], self.workers[getattr(report, "worker_id", "main")]):
            spent.seconds += report.duration
            spent.tests += report.when == "call"

    def over(self) -> list[str]:
        return [name for name, most_s in BUDGET_S.items() if self.folders[name].seconds > most_s]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.hold and self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if sum(spent.tests for spent in self.folders.values()) < 200:
            return
        terminalreporter.section("seconds by folder")
        for name, spent in sorted(self.folders.items(), key=lambda each: -each[1].seconds):
            most_s = BUDGET_S.get(name, 0.0)
            terminalreporter.line(
                f"{name:8} {spent.seconds:7.1f} s of {most_s:4.0f} s  {spent.tests:5} tests"
                + ("  OVER ITS BUDGET" if name in self.over() else "")
            )
        for name, spent in sorted(self.workers.items()):
            terminalreporter.line(f"{name:8} {spent.seconds:7.1f} s")
