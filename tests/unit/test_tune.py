"""job=tune: what a learning-rate range test says of a loss, and the search for the largest micro-batch."""

from __future__ import annotations

import json
import math
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.api.lr import Geometric
from dtf.jobs import largest_micro_batch as sizes
from dtf.jobs import tune
from dtf.jobs.largest_micro_batch import HostGuard, Trial, expected_bytes, refusal, search, wants_memory
from dtf.jobs.range_test import judge, table
from dtf.jobs.tune import _part_to_draw
from tests.support.launching import HANG_S

STEPS = 200
RATES = [Geometric(peak=10.0, start=1e-6)(step, STEPS) for step in range(STEPS)]


def bowl(rate: float) -> float:
    """A loss that falls from 2 on, is least at 0.3 and grows beyond."""
    return 2 - 1.5 * math.exp(-(math.log10(rate / 0.3) ** 2)) + (rate > 1) * (rate - 1) ** 2


def test_the_suggestion_is_a_tenth_of_the_rate_at_the_least_loss() -> None:
    test = judge(RATES, [bowl(rate) for rate in RATES])
    assert test.least_at is not None and 0.3 <= test.least_at <= 3  # a running mean is late
    assert test.suggestion == test.least_at / 10
    assert test.steepest is not None and test.steepest < test.least_at and test.diverged
    assert f"suggestion: lr.peak={test.suggestion:.2g}, a tenth" in list(table(test))[-1]


def test_the_running_mean_has_no_bias() -> None:
    assert judge(RATES, [0.7] * STEPS).smoothed == pytest.approx([0.7] * STEPS)


def test_a_loss_that_does_not_fall_gives_no_suggestion() -> None:
    for losses in ([2.0] * STEPS, [2.0 + step / STEPS for step in range(STEPS)], [None] * STEPS, [2.0, None]):
        test = judge(RATES[: len(losses)], losses)
        assert test.suggestion is None and "no suggestion" in list(table(test))[-1]


def test_a_fall_that_batches_may_have_made_is_none() -> None:
    scatter = random.Random(0)
    noise = [scatter.gauss(0, 0.1) for _ in RATES]
    for fall in (0.0, 0.2):
        losses = [2 + one - fall * (rate > 0.01) for one, rate in zip(noise, RATES, strict=True)]
        assert (judge(RATES, losses).suggestion is None) == (fall == 0)


def test_what_comes_after_divergence_says_nothing() -> None:
    falling = [2.0 - step / 100 for step in range(100)]
    for rest in ([None] * 100, [1e6] * 100):
        test = judge(RATES, [*falling, *rest])
        assert test.diverged and test.least_at == RATES[99] and len(test.smoothed) <= 103
    assert any("training diverges" in line for line in table(test))
    assert "larger rates may train too" in " ".join(table(judge(RATES[:100], falling)))


@given(limit=st.integers(0, 3000), most=st.integers(1, 2000), pairs=st.booleans())
def test_the_search_finds_the_limit(limit: int, most: int, pairs: bool) -> None:
    """Within a sixteenth, in few trials, none of them twice."""
    unit = 2 if pairs else 1
    trials = search(most, unit, lambda rows: Trial(rows, rows <= limit), lambda trials, rows: "")
    tried = [trial.rows for trial in trials]
    best = max((trial.rows for trial in trials if trial.fits), default=0)
    assert len(tried) == len(set(tried)) <= 20 and all(rows % unit == 0 or rows == most for rows in tried)
    true = min(limit, most)
    assert best <= true and (best > true - max(unit, true / 16) - unit or best == most)


def test_what_cannot_fit_is_not_tried() -> None:
    def try_rows(rows: int) -> Trial:
        assert rows <= 90, "this one would have taken all memory"
        return Trial(rows, True, planned=100 + 10 * rows, peak=300 + 10 * rows)

    trials = search(1000, 1, try_rows, refusal(round(2 * 1200 / sizes.HEADROOM), 2))
    assert max(trial.rows for trial in trials if trial.fits) in range(84, 91)
    assert "expected for each of 2 processes" in next(trial.why for trial in trials if not trial.fits)


def test_the_larger_of_plan_and_measurement_is_expected() -> None:
    first, plan, more = Trial(8, True, 80, 200), Trial(16, True, 160, 210), Trial(16, True, 160, 400)
    assert expected_bytes([first], 32) is None
    assert expected_bytes([first, plan], 32) == 210 + 2 * 80
    assert expected_bytes([first, more], 32) == 400 + 2 * 200
    assert refusal(None, 2)([first, more], 10**9) == ""


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate",
        "killed by SIGKILL; by somebody, or by the system for want of memory",
    ],
)
def test_errors_that_want_memory_are_known(text: str) -> None:
    assert wants_memory(text) and not wants_memory("mat1 and mat2 shapes cannot be multiplied")


_RANK = "import time; print(1, flush=True); time.sleep(600)"
_SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_RANK!r}])"


def _server_and_rank() -> tuple[subprocess.Popen[bytes], int]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    (rank,) = (number for number, one in sizes.process_tree(os.getpid()).items() if one.parent == server.pid)
    return server, rank


def _ended(process: int, patience_s: float) -> bool:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], patience_s)[0])
    finally:
        os.close(handle)


def test_ranks_end_before_the_host_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server lives on, and the kernel takes ranks first."""
    other, server = None, None
    try:
        other, its_rank = _server_and_rank()
        with HostGuard(1000) as guard:
            server, rank = _server_and_rank()
            for _ in iter(lambda: Path(f"/proc/{rank}/oom_score_adj").read_text(), "1000\n"):
                assert not _ended(rank, 0.01)
            monkeypatch.setattr(sizes, "available_bytes", lambda: 10)
            assert _ended(rank, HANG_S)
        assert guard.struck
        assert not _ended(its_rank, 0), "a rank that was there before is somebody else's"
        os.kill(its_rank, signal.SIGKILL)
    finally:
        for process in filter(None, (other, server)):
            process.kill()
            process.wait()


TOY = ("plugins=[tests.support.toy]", "recipe=toy", "launcher.processes=1", "observer=[console]")


def test_a_learning_rate_of_a_run(run_dtf) -> None:
    pytest.importorskip("matplotlib")
    done = run_dtf("job=tune", *TOY, "job.steps=30", "lr=cosine", "lr.warmup=5")
    assert done.code == 0, done.err
    found = json.loads((done.folder / "tune.json").read_text())
    assert found["rates"][0] == pytest.approx(1e-7) and len(found["smoothed"]) <= 30
    assert (done.folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert "suggestion" in done.out and sorted(os.listdir(done.folder)) == ["tune.json", "tune.png"]


def test_a_micro_batch_of_a_run(run_dtf) -> None:
    done = run_dtf("job=tune", "job.key=step.micro_batch_rows", *TOY, "step.batch_size=12")
    assert done.code == 0, done.err
    found = json.loads((done.folder / "tune.json").read_text())
    assert [trial["rows"] for trial in found["trials"]] == [8, 12] and found["suggestion"] == 12
    assert all(trial["planned"] and trial["peak"] for trial in found["trials"])
    assert "suggestion: step.micro_batch_rows=12, the whole share of a process in step.batch_size=12" in done.out


def test_a_run_that_has_no_memory_left_does_not_fit(run_dtf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is out of memory at once: ranks are ended, and the job says so."""
    monkeypatch.setattr(sizes, "available_bytes", lambda: 10)
    done = run_dtf("job=tune", "job.key=step.micro_batch_rows", *TOY, "step.batch_size=2")
    assert done.code == 0, done.err
    assert "does not fit: the host would have had too little left" in done.out and "no suggestion" in done.out


def test_what_cannot_be_tuned_is_refused(run_dtf) -> None:
    for keys, message in (
        (["job.key=seed"], "job.key=seed cannot be tuned"),
        (["launcher=inline"], "job=tune starts new ranks for each trial"),
        (["job.low=1", "job.high=0.1"], "job.low=1.0 must be less than job.high=0.1"),
    ):
        done = run_dtf("job=tune", *TOY[:2], *keys)
        assert done.code == 2 and message in done.err


def test_a_folder_that_cannot_be_made_is_refused_before_a_trial(
    run_dtf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tune, "_train", lambda *_: pytest.fail("a trial was started"))
    (tmp_path / "file").touch()
    done = run_dtf("job=tune", *TOY[:2], folder=tmp_path / "file" / "run")
    assert done.code == 2 and "cannot be written: Not a directory; choose another run.dir" in done.err


def test_the_picture_shows_how_the_loss_fell_where_training_diverges() -> None:
    low, high = _part_to_draw([1.4, 1.4, 1.2, 1.0, 90.0]) or (0, 0)
    assert low < 1.0 and 1.4 < high < 2.0
    assert _part_to_draw([]) is None
