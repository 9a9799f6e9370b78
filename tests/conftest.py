"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import ranks as pool

# A busy machine is not a failing property.
settings.register_profile("dtf", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dtf")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """`ranks(count, "tests.module:function", **arguments)`: see `tests.support.ranks.ranks`."""
    return pool.ranks


@dataclass(frozen=True)
class Result:
    """What one dtf command left behind."""

    code: int
    folder: Path  # the run folder it was told to use; it may not exist
    out: str
    err: str


@pytest.fixture
def run_dtf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`run_dtf("strategy=ddp", "train.steps=2")`: the command line in this process, so that the forkserver stays warm.

    The current directory is the test's own. A rank has one thread, unless told otherwise: several wait for each other
    where other work takes a core, and such a run takes ten times as long. Each call gets a run folder of its own,
    unless `folder=` names one.
    """
    from dtf.cli.main import main
    from dtf.host import devices

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "cores", lambda: 1)
    calls = 0

    def run(*overrides: str, folder: Path | None = None) -> Result:
        nonlocal calls
        calls += 1
        where = folder or tmp_path / f"run{calls}"
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([*overrides, f"run.dir={where}"])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Result(int(code or 0), where, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in an empty folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
