"""Heartbeats: what the launching process reads is what a rank said last, and saying it costs nothing."""

from __future__ import annotations

import os
import sys
import time
from types import FrameType
from typing import Any

import pytest

from dtf.host import heartbeat
from dtf.host.heartbeat import Beat, Board
from dtf.launch.rank_handle import Limits


@pytest.fixture(autouse=True)
def own_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_cell", heartbeat._cell)  # back to memory that nobody reads


def test_a_board_shows_the_last_beat_of_each_rank() -> None:
    board = Board(3)
    begun = time.monotonic()
    if (child := os.fork()) == 0:
        heartbeat.attach(board.fd, 1)
        for step in range(5):
            heartbeat.beat("step", step)
        heartbeat.beat("save", 5)
        os._exit(0)
    os.waitpid(child, 0)
    at, *rest = board.read(1)
    assert begun <= at <= time.monotonic()
    assert rest == ["save", 5, 5]
    assert [board.read(rank)[1:] for rank in (0, 2)] == [("start", 0, 0)] * 2
    board.close()


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(KeyError):
        heartbeat.beat("lunch", 1)


def test_a_beat_is_a_look_at_the_clock_and_no_other_call() -> None:
    """So it costs less than a microsecond, which `bench.startup` measures."""
    called: list[str] = []

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            called.append(getattr(argument, "__name__", frame.f_code.co_name))

    sys.setprofile(see)
    try:
        heartbeat.beat("step", 7)
    finally:
        sys.setprofile(None)
    assert called == ["beat", "monotonic", "setprofile"]


def test_the_first_step_of_a_process_has_the_time_of_a_start() -> None:
    limits = Limits(hang_timeout_s=3, start_timeout_s=600, grace_s=25)
    silences = {phase: limits.silence(Beat(0, phase, 120, 2)) for phase in heartbeat.PHASES}
    assert silences == {
        "start": 600,
        "rendezvous": 600,
        "fetch": 3,
        "step": 3,
        "log": 3,
        "evaluate": 600,
        "save": 600,
        "wait": 600,
        "stop": 600,
        "end": 600,
        "compile": 600,
    }
    assert limits.silence(Beat(0, "step", 120, 1)) == 600


def test_nobody_hangs_while_a_rank_compiles_and_the_phase_before_goes_on_after_it() -> None:
    board, limits = Board(1), Limits(hang_timeout_s=60.0, start_timeout_s=600.0, grace_s=25.0)
    heartbeat.attach(board.fd, 0)
    heartbeat.beat("step", 7)
    heartbeat.beat("step", 8)
    with heartbeat.compiling():
        beat = board.read(0)
        assert (beat.phase, beat.step, beat.steps) == ("compile", 8, 2)
        assert limits.compiles([beat], beat.at + 599) and not limits.compiles([beat], beat.at + 601)
    after = board.read(0)
    assert (after.phase, after.step, after.steps) == ("step", 8, 2) and after.at >= beat.at
    assert not limits.compiles([after], after.at) and limits.silence(after) == 60.0
