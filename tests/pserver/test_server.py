"""A server by itself: pushes that come twice, late, early and damaged; pulls that are too late; an end to which nobody
comes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dtf.api.options import StepOptions
from dtf.api.recipe import Recipe
from dtf.api.task import Task
from dtf.core.errors import SaveError
from dtf.core.types import Place, Train
from dtf.distributed.world import World
from dtf.optim.optimizers import Sgd
from dtf.pserver import session
from dtf.pserver.net import messages
from dtf.pserver.net.codec import decode, encode
from dtf.pserver.net.messages import EXCHANGE, HELLO, LATE, LEASE, OVER, READY
from dtf.pserver.net.transport import Refused
from dtf.pserver.options import Mode
from dtf.pserver.param_slices import views
from dtf.pserver.push import Push
from dtf.pserver.record.recorder import Recorder
from dtf.pserver.server import handlers as desks
from dtf.pserver.server import program
from dtf.pserver.server.handlers import Desk
from dtf.pserver.server.program import Serving
from dtf.pserver.strategy import Pserver
from dtf.sparse.row_optimizers import RowAdagrad
from dtf.sparse.table_layouts import owner_of
from tests.support.harness import PRECISIONS
from tests.support.sparse_toy import Tabled
from tests.support.toy import Toy

SOON_S = 20.0


@contextmanager
def server(
    mode: Mode = Mode.sync, trainers: int = 2, recipe: Recipe | None = None, **options: Any
) -> Iterator[tuple[Serving, Desk, ThreadPoolExecutor]]:
    """One server with its desk, and a thread for the engine."""
    recipe = recipe or Toy(batch_norm=False)
    task = Task(recipe, Sgd(), PRECISIONS["fp64"], StepOptions(batch_size=24, micro_batch_rows=6), 0, rows=RowAdagrad())
    world, strategy = World(Place(size=1, slots=trainers)), Pserver(mode=mode, **options)
    made = Serving(task, world, strategy, strategy.merging(), trainers)
    with ThreadPoolExecutor(1) as engine:
        try:
            yield made, Desk(made, task, {}, 0, 60.0), engine
        finally:
            made.fail(RuntimeError("the test is over"))


def push(made: Serving, step: int, part: int, value: float | None = None) -> Push:
    """A gradient that is the same number everywhere, another one for each push."""
    memory = torch.zeros(made.holdings.layout.bytes, dtype=torch.uint8)
    for view in views(memory, made.holdings.layout.learning):
        view.fill_(0.01 * (1 + step + 0.1 * part) if value is None else value)
    rows = np.arange(part, 24, made.shares)
    return Push(0, step, part, memory.numpy(), {}, 1, 1.0, 0, 0, 0, 0, np.array([12.0, 1.0, 1.0]), np.empty(0), rows)


def ticket(step: int) -> Train:
    return Train(step, 0, step, 24, 0.1)


def learnt(made: Serving) -> bytes:
    return b"".join(box.tensor.numpy().tobytes() for box in made.state().boxes)


def steps(made: Serving, count: int) -> None:
    for step in range(count):
        made.step(ticket(step), None)
    made.sync()


def in_order(count: int, mode: Mode = Mode.sync) -> bytes:
    with server(mode) as (made, _, engine):
        done = engine.submit(steps, made, count)
        for step in range(count):
            until(lambda step=step: made._last >= step)
            for part in range(made.shares):
                made.receive(push(made, step, part))
        done.result(SOON_S)
        return learnt(made)


def until(true: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < SOON_S
        time.sleep(0.001)


def test_pushes_in_any_order_and_number_are_applied_once_and_in_order() -> None:
    """Of four steps, three are open at once: some come before theirs is, some after it is done."""
    with server() as (made, _, engine):
        done = engine.submit(steps, made, 4)
        until(lambda: made._last == 2)
        for step, part in [(3, 1), (1, 1), (2, 0), (1, 1), (3, 1), (0, 1), (0, 1), (0, 0)]:
            made.receive(push(made, step, part))
        until(lambda: made.version == 1)
        for step, part in [(0, 0), (1, 0), (3, 0), (0, 1), (2, 1), (2, 1)]:
            made.receive(push(made, step, part))
        done.result(SOON_S)
        made.receive(push(made, 3, 0))
        assert made.holdings.applied == 4 and made.dropped == 7
        assert learnt(made) == in_order(4)
        assert [(step, len(ids)) for step, ids in made.consumed()] == [
            (step, 12) for step in range(4) for _ in range(2)
        ]


@pytest.mark.parametrize("mode", [Mode.async_, Mode.half_async])
def test_a_push_for_a_step_that_is_not_open_yet_keeps_nobody_waiting(mode: Mode) -> None:
    """As when another server is ahead, and trainers that learn of work from it."""
    with server(mode, staleness=0) as (made, _, engine):
        done = engine.submit(steps, made, 3)
        for step in (2, 1, 0):
            for part in range(made.shares):
                made.receive(push(made, step, part))
        done.result(SOON_S)
        assert learnt(made) == in_order(3, mode) and made.dropped == 0


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
def test_a_push_that_comes_again_while_it_is_applied_changes_nothing(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(mode) as (made, _, engine):
        plain = made.holdings.apply

        def apply(pushes: Any, tickets: Any) -> Any:
            for each in pushes:
                made.receive(each)
            return plain(pushes, tickets)

        monkeypatch.setattr(made.holdings, "apply", apply)
        done = engine.submit(steps, made, 2)
        for step in range(2):
            for part in range(made.shares):
                made.receive(push(made, step, part))
        done.result(SOON_S)
        assert made.holdings.applied == 2 and made.dropped == 2 * made.shares and not made._basket


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
def test_a_push_for_a_share_that_there_is_not_counts_for_nothing(mode: Mode) -> None:
    """Neither when its step is open, nor when it comes before."""
    with server(mode, staleness=None if mode is Mode.sync else 0) as (made, _, engine):
        for step in (0, 1, 2):
            made.receive(push(made, step, made.shares))
        done = engine.submit(steps, made, 3)
        for step in range(3):
            for part in (made.shares + 1, -1, *range(made.shares)):
                made.receive(push(made, step, part))
        done.result(SOON_S)
        assert learnt(made) == in_order(3, mode) and not made._basket


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(value: float, mode: Mode) -> None:
    with server(mode) as (made, _, engine):
        before = learnt(made)
        done = engine.submit(steps, made, 2)
        for part in range(made.shares):
            made.receive(push(made, 0, part, value if part == 0 else None))
        until(lambda: made.version == 1)
        assert made.skipped() == 1 and learnt(made) == before
        for part in range(made.shares):
            made.receive(push(made, 1, part))
        done.result(SOON_S)
        assert made.skipped() == 1 and learnt(made) != before


def pull(desk: Desk, after: int) -> dict[str, Any]:
    request, reply = messages.exchange_schemas(Toy())
    scalars = {"trainer": 0, "pull": 1, "after": after, "train": 1, "known": -1, "frozen": 0, "wait_s": 0.0}
    scalars |= {"of_step": after, "of_part": 0, "at": after}
    return dict(decode(reply, desk.handlers[EXCHANGE](encode(request, scalars, {}))).scalars)


def lease(desk: Desk, trainer: int, **scalars: Any) -> Any:
    request, reply = messages.lease_schemas()
    keys = {"done": np.empty((0, 3), np.int64), "has": np.empty((0, 3), np.int64)}
    given = {"trainer": trainer, "most": 2, "wait_s": 0.0, "stopping": 0} | scalars
    return decode(reply, desk.handlers[LEASE](encode(request, given, keys)))


def greet(desk: Desk, trainer: int, starter: str, facts: dict[str, Any] | None = None) -> Any:
    request, reply = messages.hello_schemas()
    told = np.frombuffer(json.dumps(facts or {}).encode(), np.uint8)
    return decode(
        reply, desk.handlers[HELLO](encode(request, {"trainer": trainer, "starter": starter}, {"facts": told}))
    )


def hello(desk: Desk, trainer: int, facts: dict[str, Any] | None = None) -> str:
    return greet(desk, trainer, "", facts).arrays["refusal"].tobytes().decode()


def test_a_pull_for_work_that_others_have_done_says_so() -> None:
    with server() as (made, desk, engine):
        done = engine.submit(steps, made, 2)
        until(lambda: made._last == 1)
        assert pull(desk, 0)["pulled"] == READY and pull(desk, 1)["pulled"] == messages.NO
        for part in range(2):
            made.receive(push(made, 0, part))
        until(lambda: made.version == 1)
        assert pull(desk, 0)["pulled"] == LATE and pull(desk, 1)["pulled"] == READY
        for part in range(2):
            made.receive(push(made, 1, part))
        done.result(SOON_S)


def test_a_trainer_of_another_kind_is_refused() -> None:
    with server() as (made, desk, engine):
        engine.submit(steps, made, 1)
        until(lambda: made.begun)
        assert "versions" in hello(desk, 0, {"versions": {"torch": "1"}}) and made.ledger.members() == []
        assert "ud800" in hello(desk, 0, {"\ud800": 1}), "JSON can name what is no text"
        assert hello(desk, 0) == "" and made.ledger.members() == [0]


def test_a_push_of_another_size_is_refused() -> None:
    with server() as (made, desk, engine):
        engine.submit(steps, made, 1)
        request, _ = messages.exchange_schemas(Toy())
        scalars = {
            "trainer": 0,
            "push": 1,
            "step": 0,
            "part": 0,
            "epoch": 0,
            "unread": 0,
            "finite": 1,
            "norm": 0.0,
            "seen": 0,
            "skipped": 0,
        }
        with pytest.raises(Refused, match="dense has 8 bytes"):
            desk.handlers[EXCHANGE](encode(request, scalars, {"dense": np.zeros(8, np.uint8)}))
        assert not made._basket


def refused(
    made: Serving, desk: Desk, recipe: Recipe, statistics: np.ndarray, ids: list[int] | None = None, **scalars: int
) -> str:
    """Why a push is, or nothing."""
    numbers = {
        "trainer": 0,
        "push": 1,
        "step": 0,
        "part": 0,
        "epoch": 0,
        "unread": 0,
        "finite": 1,
        "norm": 0.0,
        "seen": 0,
        "skipped": 0,
    } | scalars
    arrays = {
        "dense": np.zeros(made.holdings.push_bytes, np.uint8),
        "sums": np.zeros(1 + len(recipe.train_metrics)),
        "statistics": statistics,
        "rows": np.empty(0, np.int64),
    }
    if ids is not None:
        arrays |= {
            "ids/ids": np.array(ids, np.int64),
            "gradients/ids": np.ones((len(ids), made.holdings.columns("ids"))),
        }
    try:
        desk.handlers[EXCHANGE](encode(messages.exchange_schemas(recipe)[0], numbers, arrays))
    except Refused as error:
        assert not made._basket
        return str(error)
    return ""


@pytest.mark.parametrize("mode", [Mode.sync, Mode.geo])
def test_statistics_that_do_not_fit_are_refused(mode: Mode) -> None:
    recipe, tickets = Toy(), 1 if mode is Mode.sync else 2
    with (
        server(mode, recipe=recipe, geo_steps=2) if mode is Mode.geo else server(mode, recipe=recipe) as (
            made,
            desk,
            engine,
        )
    ):
        numbers = 2 * 16 * tickets
        assert refused(made, desk, recipe, np.zeros(numbers)) == "step 0 is not open"
        done = engine.submit(steps, made, 2)
        until(lambda: made._last >= tickets - 1)
        for length in (0, numbers - 1, numbers + 1, 2 * numbers):
            assert f"statistics are {length} numbers, not {tickets} times 32" in refused(
                made, desk, recipe, np.zeros(length)
            )
        spoilt = np.zeros(numbers)
        spoilt[-1] = np.inf
        assert "statistics are not" in refused(made, desk, recipe, spoilt, finite=tickets)
        assert refused(made, desk, recipe, spoilt, finite=tickets - 1, skipped=1) == "" and not done.done()


def test_a_push_whose_statistics_are_not_finite_is_a_skipped_step() -> None:
    recipe = Toy()
    with server(recipe=recipe) as (made, desk, engine):
        done, before = engine.submit(steps, made, 1), learnt(made)
        until(lambda: made._last == 0)
        assert (
            refused(made, desk, recipe, np.full(32, np.nan), finite=0)
            == refused(made, desk, recipe, np.zeros(32), part=1)
            == ""
        )
        done.result(SOON_S)
        assert made.skipped() == 1
        counted = {box.name: box.tensor for box in made.state().boxes if not box.name.endswith("num_batches_tracked")}
        assert b"".join(tensor.numpy().tobytes() for tensor in counted.values()) in before and len(counted) > 2


@pytest.mark.parametrize("ids", [[-1], [-2], [3, 200], [1 << 40]])
def test_a_push_of_rows_that_are_not_here_is_refused(ids: list[int]) -> None:
    recipe = Tabled(size=200)
    with server(recipe=recipe) as (made, desk, engine):
        engine.submit(steps, made, 1)
        until(lambda: made._last == 0)
        statistics = np.zeros(made.holdings.statistics_numbers)
        assert refused(made, desk, recipe, statistics, ids) == "ids/ids has some that are not of this server"
        assert refused(made, desk, recipe, statistics, [3, 5]) == ""
        made.holdings._world.size = 2
        assert [made.holdings.owns("ids", np.array([each])) for each in range(99)] == [
            each == 0 for each in owner_of(np.arange(99), 2)
        ]


def test_a_trainer_that_was_given_up_joins_again() -> None:
    with server() as (made, desk, engine):
        engine.submit(steps, made, 1)
        until(lambda: made.begun)
        hello(desk, 0)
        assert len(lease(desk, 0).arrays["numbers"]) == 2 and not lease(desk, 1).scalars["known"]
        with made.change:
            assert made.ledger.give_up(time.monotonic() + 1) == [0]
        assert not lease(desk, 0).scalars["known"]
        hello(desk, 0)
        assert len(lease(desk, 0).arrays["numbers"]) == 2, "the same work again"


def test_a_number_is_of_one_trainer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command that gives it is refused while the first one is heard, and gets in when that is silent or has
    left; a launcher's at once.
    """
    monkeypatch.setattr(desks, "LONGEST_WAIT_S", 0.05)
    with server() as (made, desk, _), ThreadPoolExecutor(1) as pool:
        made.begun = True
        hello(desk, 0)
        assert hello(desk, 0) == "", "started again by the same launcher"
        second = greet(desk, 0, "another").scalars
        assert not second["ready"] and not second["taken"], "it may have died: wait"
        monkeypatch.setattr(desks, "LONGEST_WAIT_S", SOON_S)
        asking = pool.submit(greet, desk, 0, "another")
        while not asking.done():
            lease(desk, 0, most=0)
            with made.change:
                made.change.notify_all()
        answer = asking.result()
        assert answer.scalars["taken"] and b"strategy.trainer_id" in answer.arrays["refusal"].tobytes()
        assert made.ledger.members() == [0]
        lease(desk, 0, leaving=1, starter="another")
        assert made.ledger.members() == [0], "the one that was refused does not take the other with it"
        desk._lease_s = 0.01
        time.sleep(0.02)
        assert greet(desk, 0, "another").scalars["ready"], "the first one was silent"
        assert not lease(desk, 0).scalars["known"], "and has to join again, to be refused"
        assert lease(desk, 0, starter="another").scalars["known"]


def test_the_end_waits_for_trainers_to_leave_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    with server() as (made, desk, engine):
        made.on_end(closed.set)
        made.begun = True
        hello(desk, 0)
        ended: Future[None] = engine.submit(made.end, "preempted")
        until(lambda: made.over)
        assert lease(desk, 0).scalars["reason"] == "preempted"
        assert (
            lease(desk, 0).scalars["state"] == OVER and lease(desk, 7).scalars["state"] == OVER and not closed.is_set()
        )
        lease(desk, 0, leaving=1)
        ended.result(SOON_S)
        assert closed.is_set()
    monkeypatch.setattr(program, "FAREWELL_S", 0.05)
    with server() as (made, desk, engine):
        made.begun = True
        hello(desk, 0)
        start = time.monotonic()
        made.end()
        assert 0.04 < time.monotonic() - start < 5.0


def test_a_run_that_was_over_when_it_began_waits_for_all_its_trainers() -> None:
    """Else they would look for servers that are gone, and for long."""
    closed = threading.Event()
    with server() as (made, desk, engine):
        made.on_end(closed.set)
        ended: Future[None] = engine.submit(made.end)
        for trainer in (0, 1):
            until(lambda: made.over)
            hello(desk, trainer)
            assert lease(desk, trainer).scalars["state"] == OVER and not closed.is_set()
            lease(desk, trainer, leaving=1)
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
    with server() as (made, _, engine):
        done = engine.submit(steps, made, 2)
        until(lambda: made._last == 1)
        made.fail(ValueError("something"))
        with pytest.raises(Exception, match="the service failed: ValueError: something"):
            done.result(SOON_S)


def test_any_server_that_was_started_by_hand_knows_where_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """job=status may ask any of them."""
    task = Task(Toy(batch_norm=False), Sgd(), PRECISIONS["fp64"], StepOptions(batch_size=24, micro_batch_rows=6), 0)
    where, handlers = ["127.0.0.1:4000", "127.0.0.1:4001"], dict[str, Any]()
    monkeypatch.setattr(World, "gather", lambda self, value: None)  # of a rank other than 0
    service = cast(Any, SimpleNamespace(add=handlers.update))
    session.serve(
        task,
        World(Place(rank=1, size=2, slots=1)),
        Pserver(endpoints=where, trainers=1),
        1,
        session.Post(service, where[1]),
    )
    assert (
        json.loads(decode(messages.status_schemas()[1], handlers[messages.STATUS](b"")).arrays["status"].tobytes())[
            "endpoints"
        ]
        == where
    )
