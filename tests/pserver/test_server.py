"""A server by itself: pushes that come twice, late and early; the end of a run with and without trainers."""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dtf.api.options import StepOptions
from dtf.api.task import Task
from dtf.core.errors import SaveError
from dtf.core.types import ManualStart, Place
from dtf.distributed.world import World
from dtf.optim.optimizers import Sgd
from dtf.pserver import bootstrap, manual_rendezvous
from dtf.pserver.net import messages
from dtf.pserver.net.codec import decode
from dtf.pserver.net.messages import OVER
from dtf.pserver.options import Mode
from dtf.pserver.record.recorder import Recorder
from dtf.pserver.server import program as program_module
from dtf.pserver.server.program import ServerProgram
from dtf.pserver.strategy import Pserver
from tests.support.harness import PRECISIONS
from tests.support.one_server import (
    SOON_S,
    hello,
    in_order,
    learnt,
    lease,
    push,
    server,
    steps,
    until,
)
from tests.support.toy import Toy


def test_pushes_in_any_order_and_number_are_applied_once_and_in_order() -> None:
    """Of four steps, three are open at once: some come before theirs is, some after it is done."""
    with server() as (program, _, engine):
        done = engine.submit(steps, program, 4)
        until(lambda: program._last == 2)
        for step, part in [(3, 1), (1, 1), (2, 0), (1, 1), (3, 1), (0, 1), (0, 1), (0, 0)]:
            program.receive(push(program, step, part))
        until(lambda: program.version == 1)
        for step, part in [(0, 0), (1, 0), (3, 0), (0, 1), (2, 1), (2, 1)]:
            program.receive(push(program, step, part))
        done.result(SOON_S)
        program.receive(push(program, 3, 0))
        assert program.server_state.applied == 4 and program.dropped == 7
        assert learnt(program) == in_order(4)
        assert [(step, len(ids)) for step, ids in program.leased.consumed()] == [
            (step, 12) for step in range(4) for _ in range(2)
        ]


@pytest.mark.parametrize("mode", [Mode.async_, Mode.half_async])
def test_a_push_for_a_step_that_is_not_open_yet_keeps_nobody_waiting(mode: Mode) -> None:
    """As when another server is ahead, and trainers that learn of work from it."""
    with server(mode, staleness=0) as (program, _, engine):
        done = engine.submit(steps, program, 3)
        for step in (2, 1, 0):
            for part in range(program.shares):
                program.receive(push(program, step, part))
        done.result(SOON_S)
        assert learnt(program) == in_order(3, mode) and program.dropped == 0


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
def test_a_push_that_comes_again_while_it_is_applied_changes_nothing(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(mode) as (program, _, engine):
        plain = program.server_state.apply

        def apply(pushes: Any, tickets: Any) -> Any:
            for applied_push in pushes:
                program.receive(applied_push)
            return plain(pushes, tickets)

        monkeypatch.setattr(program.server_state, "apply", apply)
        done = engine.submit(steps, program, 2)
        for step in range(2):
            for part in range(program.shares):
                program.receive(push(program, step, part))
        done.result(SOON_S)
        assert program.server_state.applied == 2 and program.dropped == 2 * program.shares and not program._basket


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
def test_a_push_for_a_share_that_there_is_not_counts_for_nothing(mode: Mode) -> None:
    """Neither when its step is open, nor when it comes before."""
    with server(mode, staleness=None if mode is Mode.sync else 0) as (program, _, engine):
        for step in (0, 1, 2):
            program.receive(push(program, step, program.shares))
        done = engine.submit(steps, program, 3)
        for step in range(3):
            for part in (program.shares + 1, -1, *range(program.shares)):
                program.receive(push(program, step, part))
        done.result(SOON_S)
        assert learnt(program) == in_order(3, mode) and not program._basket


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(value: float, mode: Mode) -> None:
    with server(mode) as (program, _, engine):
        before = learnt(program)
        done = engine.submit(steps, program, 2)
        for part in range(program.shares):
            program.receive(push(program, 0, part, value if part == 0 else None))
        until(lambda: program.version == 1)
        assert program.skipped() == 1 and learnt(program) == before
        for part in range(program.shares):
            program.receive(push(program, 1, part))
        done.result(SOON_S)
        assert program.skipped() == 1 and learnt(program) != before


def test_the_end_waits_for_trainers_to_leave_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    with server() as (program, servicer, engine):
        program.on_end(closed.set)
        program.begun = True
        hello(servicer, 0)
        ended: Future[None] = engine.submit(program.leased.end, "preempted")
        until(lambda: program.over)
        assert lease(servicer, 0).scalars["reason"] == "preempted"
        assert (
            lease(servicer, 0).scalars["state"] == OVER
            and lease(servicer, 7).scalars["state"] == OVER
            and not closed.is_set()
        )
        lease(servicer, 0, leaving=1)
        ended.result(SOON_S)
        assert closed.is_set()
    monkeypatch.setattr(program_module, "FAREWELL_S", 0.05)
    with server() as (program, servicer, engine):
        program.begun = True
        hello(servicer, 0)
        start = time.monotonic()
        program.leased.end()
        assert 0.04 < time.monotonic() - start < SOON_S


def test_a_server_that_waits_for_another_one_looks_after_its_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one may lack the push of a trainer that was killed. Once the run is over, none is waited for."""
    looked = list[ServerProgram]()
    with server() as (program, _, _engine):
        program._world, program.while_waiting = cast(Any, SimpleNamespace(size=2)), looked.append
        seconds = itertools.count(step=60)  # between two looks at the clock
        monkeypatch.setattr("dtf.pserver.server.program.monotonic", lambda: float(next(seconds)))
        for program.over in (False, True):
            barrier = SimpleNamespace(is_completed=iter([False, True]).__next__, wait=lambda: None)
            monkeypatch.setattr("torch.distributed.barrier", lambda async_op, barrier=barrier: barrier)
            program._barrier()
            assert looked == [program]


def test_a_run_that_was_over_when_it_began_waits_for_all_its_trainers() -> None:
    """Else they would look for servers that are gone, and for long."""
    closed = threading.Event()
    with server() as (program, servicer, engine):
        program.on_end(closed.set)
        ended: Future[None] = engine.submit(program.leased.end)
        for trainer in (0, 1):
            until(lambda: program.over)
            hello(servicer, trainer)
            assert lease(servicer, trainer).scalars["state"] == OVER and not closed.is_set()
            lease(servicer, trainer, leaving=1)
        ended.result(SOON_S)
        assert closed.is_set()


def test_an_order_that_cannot_be_written_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "order").write_text("a file")
    with pytest.raises(SaveError, match="order_server_0.jsonl could not be written"):
        Recorder(tmp_path / "order", 0, 0)
    (tmp_path / "order_server_1.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path, 1, 0)
    with pytest.raises(SaveError, match="No space left"):
        recorder.applied([])


def test_an_error_in_the_service_ends_the_engine() -> None:
    with server() as (program, _, engine):
        done = engine.submit(steps, program, 2)
        until(lambda: program._last == 1)
        program.fail(ValueError("something"))
        with pytest.raises(Exception, match="the service failed: ValueError: something"):
            done.result(SOON_S)


def test_any_server_that_was_started_manually_knows_where_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """job=status may ask any of them."""
    task = Task(Toy(batch_norm=False), Sgd(), PRECISIONS["fp64"], StepOptions(batch_size=24, micro_batch_rows=6), 0)
    where, handlers = ["127.0.0.1:4000", "127.0.0.1:4001"], dict[str, Any]()
    monkeypatch.setattr(World, "gather", lambda self, value: None)  # of a rank other than 0
    service = cast(Any, SimpleNamespace(add=handlers.update))
    bootstrap.serve(
        task,
        World(Place(rank=1, size=2, slots=1, manual=ManualStart(tuple(where)))),
        Pserver(servers=2),
        1,
        manual_rendezvous.ServerBootstrap(service, where[1]),
    )
    assert (
        json.loads(decode(messages.status_schemas()[1], handlers[messages.STATUS](b"")).arrays["status"].tobytes())[
            "endpoints"
        ]
        == where
    )
