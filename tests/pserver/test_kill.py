"""Real processes of a parameter server run: kill -9 and SIGTERM of each of them cost nothing but time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtf.runs.compare import RecordedRun
from tests.laws.test_recovery import RUN, measurements
from tests.support.launching import HANG_S

slow = pytest.mark.slow
BASE = [
    *RUN,
    "plugins=[tests.support.broken_strategies,tests.support.kill_trigger]",
    "strategy=pserver",
    "launcher.processes=2",
    "launcher.threads=1",
    "train.log_every=1",
]
TWO = ["strategy.servers=2", "strategy.min_block=1"]
THRICE = Counter(dict.fromkeys(range(100), 3))


def bits(folder: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in RecordedRun.read(folder).tensors.items()}


def visits(folder: Path) -> Counter[int]:
    """How often each sample was used in the first three epochs."""
    ids = RecordedRun.read(folder).ids
    return Counter(i for step in ids if step < 15 for rank in ids[step] for i in rank)


def left(folder: Path) -> list[str]:
    """Processes that have the run folder open, and shared memory of the project."""
    remains = []
    for process in Path("/proc").glob("[0-9]*/fd"):
        try:
            names = [os.readlink(link) for link in process.iterdir()]
        except OSError:
            continue
        remains += [
            str(process) for name in names if name.startswith(str(folder)) and process.parent.name != str(os.getpid())
        ]
    return remains


CALM: dict[tuple[str, ...], Path] = {}


@pytest.fixture
def calm(run_dtf: Callable[..., Any]) -> Callable[..., Path]:
    """The run that nothing happens to, made once in this file for the same words."""

    def run(*words: str) -> Path:
        if words not in CALM:
            done = run_dtf(*BASE, *words)
            assert done.code == 0, done.err
            CALM[words] = done.folder
        return CALM[words]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("servers", [pytest.param([], marks=slow), TWO], ids=["one server", "two servers"])
def test_a_killed_trainer_leaves_sync_bit_for_bit(
    servers: list[str], run_dtf: Any, calm: Callable[..., Path], tmp_path: Path
) -> None:
    """It is started again alone: the servers go on."""
    whole = calm(*servers)
    killed = run_dtf(*BASE, *servers, f"recipe.marker={tmp_path / 'killed'}")
    assert killed.code == 0, killed.err
    assert (tmp_path / "killed").exists() and bits(whole) == bits(killed.folder)
    assert measurements(whole) == measurements(killed.folder) and visits(killed.folder) == THRICE
    assert left(killed.folder) == []


@pytest.mark.parametrize("servers", [[], pytest.param(TWO, marks=slow)], ids=["one server", "two servers"])
@pytest.mark.parametrize("mode", [pytest.param("async", marks=()), pytest.param("half_async", marks=slow)])
def test_a_killed_trainer_loses_no_sample_in_other_modes(
    mode: str, servers: list[str], run_dtf: Any, tmp_path: Path
) -> None:
    more = ["step.clip_norm=0", "observer=[jsonl,events]", f"recipe.marker={tmp_path / 'killed'}"]
    killed = run_dtf(*BASE, *servers, f"strategy.mode={mode}", *more)
    assert killed.code == 0, killed.err
    events = (killed.folder / "events.jsonl").read_text()
    assert re.search(r"trainer \d recovered in [\d.]+ s: noticed .* stepped", events), events
    assert (tmp_path / "killed").exists() and visits(killed.folder) == THRICE
    assert left(killed.folder) == []


@pytest.mark.parametrize("rank", [pytest.param(0, marks=slow), 1])
def test_a_killed_server_takes_all_back_to_the_last_checkpoint(
    rank: int, run_dtf: Any, calm: Callable[..., Path]
) -> None:
    whole = calm(*TWO)
    killed = run_dtf(*BASE, *TWO, "observer=[jsonl,kill_trigger]", f"observer.kill_trigger.orders=['7:{rank}:SIGKILL']")
    assert killed.code == 0, killed.err
    assert bits(whole) == bits(killed.folder) and visits(killed.folder) == THRICE
    assert measurements(whole) == measurements(killed.folder)
    assert left(killed.folder) == []


@slow
@pytest.mark.parametrize("servers", [[], TWO], ids=["one server", "two servers"])
@pytest.mark.parametrize("who", ["launcher", "server", "trainer"])
def test_sigterm_to_anybody_saves_and_ends(
    who: str, servers: list[str], run_dtf: Any, calm: Callable[..., Path]
) -> None:
    whole = calm(*servers)
    rank = {"launcher": -1, "server": 0, "trainer": 2 if servers else 1}[who]
    stopped = run_dtf(
        *BASE, *servers, "observer=[jsonl,kill_trigger]", f"observer.kill_trigger.orders=['7:{rank}:SIGTERM']"
    )
    assert stopped.code == 75, stopped.err
    assert run_dtf(*BASE, *servers, folder=stopped.folder).code == 0
    assert bits(whole) == bits(stopped.folder) and visits(stopped.folder) == THRICE
    assert left(stopped.folder) == []


@slow
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, calm: Callable[..., Path], run_dtf: Any) -> None:
    """Nor is anything lost that was saved."""
    folder = tmp_path / "killed"
    words = [
        *BASE,
        *TWO,
        "observer=[jsonl,kill_trigger]",
        "observer.kill_trigger.orders=['7:-1:SIGKILL']",
        f"run.dir={folder}",
    ]
    command = [sys.executable, "-m", "dtf", *words]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    killed = time.monotonic()
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    while processes := left(folder):
        assert time.monotonic() - killed < HANG_S, processes
        time.sleep(0.01)
    again = run_dtf(*BASE, *TWO, folder=folder)
    assert again.code == 0, again.err
    assert bits(calm(*TWO)) == bits(folder)
