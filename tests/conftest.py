"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import ranks as pool
from tests.support.budget import BUDGET_S, Budget

# Dozens of processes import dtf and torch: without bytecode each of them compiles dtf again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# No test depends on what another one, or a run of this user, has found of a model.
os.environ["XDG_CACHE_HOME"] = os.path.join(os.devnull, "cache")

# A busy machine is not a failing property; two workers would share a database of examples.
# Each run draws others: fifty of each property, where its test does not say how many.
settings.register_profile(
    "dtf", deadline=None, database=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dtf")

LONG = {
    "test_auc",
    "test_config",
    "test_config_errors",
    "test_ctr_clicks",
    "test_ctr_models",
    "test_ctr_parsing",
    "test_describe",
    "test_resnet_recipe",
}
"""Files of tests/unit that `--fast` leaves out."""

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hold-budget", action="store_true", help="fail when a folder takes longer than its budget")
    parser.addoption(
        "--fast", action="store_true", help="leave out unit tests of more than seconds, and laws on more than two ranks"
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected: imports make no garbage worth looking for
    config.pluginmanager.register(Budget(bool(config.getoption("hold_budget"))), "budget")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The folders that take longest first, so that both workers end at the same time."""
    order = list(BUDGET_S)
    items.sort(key=lambda item: order.index(name) if (name := item.path.parent.name) in order else len(order))
    if config.getoption("fast"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_fast(item)])
        items[:] = [item for item in items if _is_fast(item)]


def _is_fast(item: pytest.Item) -> bool:
    """Of the laws, those that name their number of processes."""
    if item.path.parent.name == "unit":
        return item.path.stem not in LONG
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    processes = parameters.get("processes")
    return isinstance(processes, int) and processes <= 2


def pytest_collection_finish() -> None:
    """One thread computes in each worker: more would wait for each other, and for those of the other worker.

    What was imported and collected stays: the garbage collector need not look at it after each few tests. Nor at what
    tests make after each 700 objects: it took a twentieth of their time.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.enable()
    gc.set_threshold(20_000, 20, 20)
    gc.freeze()


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty run folder."""
    made = tmp_path / "run"
    made.mkdir()
    return made


@pytest.fixture
def tracker_stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The libraries of trackers are stand-ins, and MLflow has its store in the folder of the test."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "support" / "tracker_stand_ins")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.json'}")
