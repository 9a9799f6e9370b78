"""What a server answers: pulls that are too late, damaged pushes, trainers that are refused or join again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dtf.api.recipe import Recipe
from dtf.pserver.net import messages
from dtf.pserver.net.codec import encode
from dtf.pserver.net.messages import EXCHANGE, LATE, READY
from dtf.pserver.net.shared_memory import InPlace
from dtf.pserver.net.transport import Refused
from dtf.pserver.options import Mode
from dtf.pserver.push import Push
from dtf.pserver.server import handlers
from dtf.pserver.server.handlers import Servicer, seen_with
from dtf.pserver.server.program import ServerProgram
from dtf.sparse.table_layouts import owner_of
from tests.support.one_server import (
    SOON_S,
    greet,
    hello,
    in_order,
    learnt,
    lease,
    pull,
    push,
    server,
    steps,
    until,
)
from tests.support.sparse_toy import Tabled
from tests.support.toy import Toy


def test_a_pull_for_work_that_others_have_done_says_so() -> None:
    with server() as (program, servicer, engine):
        done = engine.submit(steps, program, 2)
        until(lambda: program._last == 1)
        assert pull(servicer, 0)["pulled"] == READY and pull(servicer, 1)["pulled"] == messages.NO
        for part in range(2):
            program.receive(push(program, 0, part))
        until(lambda: program.version == 1)
        assert pull(servicer, 0)["pulled"] == LATE and pull(servicer, 1)["pulled"] == READY
        for part in range(2):
            program.receive(push(program, 1, part))
        done.result(SOON_S)


def test_a_trainer_of_another_kind_is_refused() -> None:
    with server() as (program, servicer, engine):
        engine.submit(steps, program, 1)
        until(lambda: program.begun)
        assert "versions" in hello(servicer, 0, {"versions": {"torch": "1"}}) and program.ledger.members() == []
        assert "ud800" in hello(servicer, 0, {"\ud800": 1}), "JSON can name what is no text"
        assert hello(servicer, 0) == "" and program.ledger.members() == [0]


def test_a_trainer_that_calls_normalisations_otherwise_than_another_is_refused() -> None:
    """All trainers join with the same list, and a push has what the micro-batches made of their averages."""
    with server(recipe=Toy()) as (program, servicer, engine):
        engine.submit(steps, program, 1)
        until(lambda: program.begun)
        for words in ("", [1], {"1": 2}):
            with pytest.raises(Refused, match="uneven is no list of names"):
                hello(servicer, 0, uneven=words)
        assert "trainers found different normalisations" in hello(servicer, 0, uneven=["0"])
        assert hello(servicer, 0, uneven=["1"]) == hello(servicer, 1, uneven=["1"]) == ""
        assert "trainers found different normalisations" in hello(servicer, 2) and program.ledger.members() == [0, 1]
        assert (program.server_state.statistics_numbers, program.server_state.buffers_numbers) == (0, 32)
        assert refused(program, servicer, Toy(), np.empty(0)) == "buffers are 0 numbers, not 32"


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ([{"sum 0": 1.0}, 7, {"0.order": 3}, 8.0], ""),
        ([{"sum 0": 1.0 + 1e-12}, 7, {"0.order": 4}, 8.0], ""),  # a clock, or a list of what was seen
        ([{"sum 0": 1.1}, 7, {"0.order": 3}, 8.0], "it gets other numbers from the same rows"),
        ([{"sum 0": 1.1}, 7, {"0.order": 4}, 8.0], "from the same rows, and has other attributes: 0.order"),
        ([{"sum 0": 1.1}, 8, {"0.order": 3}, 8.0], ""),  # machines draw differently: servers send theirs
        ([{"sum 0": 1.1}, 8, {"0.order": 4}, 8.0], "it drew other initial numbers, and has other attributes: 0.order"),
    ],
)
def test_a_trainer_with_another_model_is_refused(start: Any, said: str) -> None:
    with server() as (program, servicer, engine):
        engine.submit(steps, program, 1)
        until(lambda: program.begun)
        assert hello(servicer, 0, start=[{"sum 0": 1.0}, 7, {"0.order": 3}, 8.0]) == ""
        refusal = hello(servicer, 1, start=start)
        assert said in refusal if said else refusal == ""
        assert program.ledger.members() == ([0] if said else [0, 1])


@pytest.mark.parametrize(
    "start",
    [1, [], [{}, 7], [{"sum 0": "a"}, 7, {}, 8.0], [{"sum 0": 10**400}, 7, {}, 8.0], [{}, 7, {}, "a"], {"a": 1}],
)
def test_what_is_no_start_is_refused(start: Any) -> None:
    with server() as (program, servicer, engine):
        engine.submit(steps, program, 1)
        until(lambda: program.begun)
        with pytest.raises(Refused, match=r"^start: "):
            hello(servicer, 0, start=start)


def test_a_push_of_another_size_is_refused() -> None:
    with server() as (program, servicer, engine):
        engine.submit(steps, program, 1)
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
            servicer.handlers[EXCHANGE](encode(request, scalars, {"dense": np.zeros(8, np.uint8)}))
        assert not program._basket


def test_the_memory_of_a_push_is_free_once_it_is_answered() -> None:
    """A push of `sync` waits for the others in the basket, while its trainer uses the memory for something else."""
    request = messages.exchange_schemas(Toy(batch_norm=False))[0]

    def send(servicer: Servicer, pushed: Push) -> None:
        scalars = {"trainer": 0, "push": 1} | {name: getattr(pushed, name) for name in NUMBERS}
        arrays = {name: getattr(pushed, name) for name in ("dense", "sums", "statistics")} | {"rows": pushed.ids}
        memory = np.frombuffer(bytearray(encode(request, scalars, arrays)), np.uint8)
        exchange = servicer.handlers[EXCHANGE]
        assert isinstance(exchange, InPlace)
        exchange.handle(memory.data, bytes)
        memory[:] = 255

    with server() as (program, servicer, engine):
        done = engine.submit(steps, program, 4)
        for step in range(4):
            until(lambda step=step: program._last >= step)
            for part in range(program.shares):
                send(servicer, push(program, step, part))
        done.result(SOON_S)
        assert learnt(program) == in_order(4)
        assert [ids.tolist() for _, ids in program.metrics.consumed()] == [
            list(range(part, 24, 2)) for _ in range(4) for part in range(2)
        ]


NUMBERS = ("step", "part", "epoch", "unread", "finite", "norm", "seen", "skipped")


def refused(
    program: ServerProgram,
    servicer: Servicer,
    recipe: Recipe,
    statistics: np.ndarray,
    ids: list[int] | None = None,
    **scalars: int,
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
        "dense": np.zeros(program.server_state.push_bytes, np.uint8),
        "sums": np.zeros(1 + len(recipe.train_metrics)),
        "statistics": statistics,
        "rows": np.empty(0, np.int64),
    }
    if ids is not None:
        arrays |= {
            "ids/ids": np.array(ids, np.int64),
            "gradients/ids": np.ones((len(ids), program.server_state.columns("ids"))),
        }
    try:
        servicer.handlers[EXCHANGE](encode(messages.exchange_schemas(recipe)[0], numbers, arrays))
    except Refused as error:
        assert not program._basket
        return str(error)
    return ""


@pytest.mark.parametrize("mode", [Mode.sync, Mode.geo])
def test_statistics_that_do_not_fit_are_refused(mode: Mode) -> None:
    recipe, tickets = Toy(), 1 if mode is Mode.sync else 2
    with (
        server(mode, recipe=recipe, geo_steps=2) if mode is Mode.geo else server(mode, recipe=recipe) as (
            program,
            servicer,
            engine,
        )
    ):
        numbers = 2 * 16 * tickets
        assert refused(program, servicer, recipe, np.zeros(numbers)) == "step 0 is not open"
        done = engine.submit(steps, program, 2)
        until(lambda: program._last >= tickets - 1)
        for length in (0, numbers - 1, numbers + 1, 2 * numbers):
            assert f"statistics are {length} numbers, not {tickets} times 32" in refused(
                program, servicer, recipe, np.zeros(length)
            )
        spoilt = np.zeros(numbers)
        spoilt[-1] = np.inf
        assert "statistics are not" in refused(program, servicer, recipe, spoilt, finite=tickets)
        assert refused(program, servicer, recipe, spoilt, finite=tickets - 1, skipped=1) == "" and not done.done()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # as `dtf.pserver.net.codec` does
def test_a_push_whose_statistics_are_not_finite_is_a_skipped_step() -> None:
    recipe = Toy()
    with server(recipe=recipe) as (program, servicer, engine):
        done, before = engine.submit(steps, program, 1), learnt(program)
        until(lambda: program._last == 0)
        assert (
            refused(program, servicer, recipe, np.full(32, np.nan), finite=0)
            == refused(program, servicer, recipe, np.zeros(32), part=1)
            == ""
        )
        done.result(SOON_S)
        assert program.skipped() == 1
        counted = {
            box.name: box.tensor for box in program.state().boxes if not box.name.endswith("num_batches_tracked")
        }
        assert b"".join(tensor.numpy().tobytes() for tensor in counted.values()) in before and len(counted) > 2


@pytest.mark.parametrize("ids", [[-1], [-2], [3, 200], [1 << 40]])
def test_a_push_of_rows_that_are_not_here_is_refused(ids: list[int]) -> None:
    recipe = Tabled(size=200)
    with server(recipe=recipe) as (program, servicer, engine):
        engine.submit(steps, program, 1)
        until(lambda: program._last == 0)
        statistics = np.zeros(program.server_state.statistics_numbers)
        assert refused(program, servicer, recipe, statistics, ids) == "ids/ids has some that are not of this server"
        assert refused(program, servicer, recipe, statistics, [3, 5]) == ""
        program.server_state._world.size = 2
        assert [program.server_state.owns("ids", np.array([row_id])) for row_id in range(99)] == [
            row_id == 0 for row_id in owner_of(np.arange(99), 2)
        ]


@pytest.mark.parametrize("seen", [np.ones((2, 2)), np.ones((3, 1)), -np.ones((3, 2)), np.full((3, 2), np.nan)])
def test_shows_that_do_not_fit_are_refused(seen: np.ndarray) -> None:
    arrays = {"ids/ids": np.arange(3), "seen/ids": seen}
    with pytest.raises(Refused, match="seen/ids are no shows and clicks of 3 ids"):
        seen_with(arrays, "ids", lives=True)
    assert seen_with(arrays, "ids", lives=False) is None


def test_a_trainer_that_was_given_up_joins_again() -> None:
    with server() as (program, servicer, engine):
        engine.submit(steps, program, 1)
        until(lambda: program.begun)
        hello(servicer, 0)
        assert len(lease(servicer, 0).arrays["numbers"]) == 2 and not lease(servicer, 1).scalars["known"]
        with program.change:
            assert program.ledger.expire(time.monotonic() + 1) == [0]
        assert not lease(servicer, 0).scalars["known"]
        hello(servicer, 0)
        assert len(lease(servicer, 0).arrays["numbers"]) == 2, "the same work again"


def test_a_number_is_of_one_trainer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command that gives it is refused while the first one is heard, and gets in when that is silent or has
    left; a launcher's at once.
    """
    monkeypatch.setattr(handlers, "LONGEST_WAIT_S", 0.05)
    with server() as (program, servicer, _), ThreadPoolExecutor(1) as pool:
        program.begun = True
        hello(servicer, 0)
        assert hello(servicer, 0) == "", "started again by the same launcher"
        second = greet(servicer, 0, "another").scalars
        assert not second["ready"] and not second["taken"], "it may have died: wait"
        monkeypatch.setattr(handlers, "LONGEST_WAIT_S", SOON_S)
        asking = pool.submit(greet, servicer, 0, "another")
        while not asking.done():
            lease(servicer, 0, most=0)
            with program.change:
                program.change.notify_all()
        answer = asking.result()
        assert answer.scalars["taken"] and b"launcher.id" in answer.arrays["refusal"].tobytes()
        assert program.ledger.members() == [0]
        lease(servicer, 0, leaving=1, starter="another")
        assert program.ledger.members() == [0], "the one that was refused does not take the other with it"
        servicer._lease_s = 0.01
        time.sleep(0.02)
        assert greet(servicer, 0, "another").scalars["ready"], "the first one was silent"
        assert not lease(servicer, 0).scalars["known"], "and has to join again, to be refused"
        assert lease(servicer, 0, starter="another").scalars["known"]
