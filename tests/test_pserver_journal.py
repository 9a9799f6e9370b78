"""A server's journal: what was acknowledged is there after a crash, once, whatever the crash left half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.launcher import Place
from dtf.optimizers.sgd import Sgd
from dtf.options import StepOptions
from dtf.pserver.desk import Desk
from dtf.pserver.journal import KEPT, Journal
from dtf.pserver.protocol import EXCHANGE, exchange_schemas
from dtf.pserver.serving import Serving
from dtf.pserver.wire import encode
from dtf.strategies.pserver import Mode, Pserver
from dtf.strategy import Task
from dtf.world import World
from tests.harness import PRECISIONS
from tests.test_pserver_kill import BASE, THRICE, bits, visits
from tests.test_serving import learnt, push, ticket
from tests.toy import Toy

MESSAGES = [b"one", b"", b"three" * 1000]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_appended_is_found_in_its_order(tmp_path: Path) -> None:
    for number, message in enumerate(MESSAGES):
        journal = Journal(tmp_path, 5, "kind")
        assert journal.found == MESSAGES[:number]
        journal.append(message)  # and no close: it was killed


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 5100), flip=st.booleans())
def test_what_a_crash_left_half_written_is_cut_off(tmp_path_factory: pytest.TempPathFactory, cut: int, flip: bool) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, 0, "kind")
    for message in MESSAGES:
        journal.append(message)
    path = folder / "from_0.journal"
    data = bytearray(path.read_bytes())
    at = min(cut, len(data) - 1)
    if flip:
        data[at] ^= 1
    path.write_bytes(data if flip else data[:at])
    again = Journal(folder, 0, "kind")
    kept = again.found
    assert kept == MESSAGES[: len(kept)] and len(kept) < len(MESSAGES)
    again.append(b"more")
    assert Journal(folder, 0, "kind").found == [*kept, b"more"]


def test_segments_follow_checkpoints(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, "kind")
    for step in range(0, 60, 10):
        journal.append(b"%d" % step)
        journal.cut(step + 10)
    assert names(tmp_path) == [f"from_{step}.journal" for step in (30, 40, 50, 60)] and KEPT == 3
    assert Journal(tmp_path, 40, "kind").found == [b"40", b"50"]  # from an older checkpoint: what came after it, in order
    assert Journal(tmp_path, 60, "kind").found == []
    again = Journal(tmp_path, 40, "kind")
    again.append(b"late")
    again.cut(50)  # the checkpoint is written once more
    assert Journal(tmp_path, 40, "kind").found == [b"40", b"50", b"late"]


def test_pushes_that_mean_something_else_now_are_forgotten(tmp_path: Path) -> None:
    Journal(tmp_path, 0, "two shares").append(b"half")
    assert Journal(tmp_path, 0, "three shares").found == []
    assert Journal(tmp_path, 0, "two shares").found == []


def server(folder: Path, mode: Mode) -> tuple[Serving, Desk]:
    task = Task(Toy(batch_norm=False), Sgd(), PRECISIONS["fp64"], StepOptions(batch_size=24, micro_batch_rows=6), 0)
    world, strategy = World(Place(size=1, slots=2)), Pserver(mode=mode, wal=True)
    world.folder = folder
    made = Serving(task, world, strategy, strategy.merging(), 2)
    return made, Desk(made, task, {}, 0, 60.0)


def send(made: Serving, desk: Desk, step: int, part: int) -> None:
    """A push as a message, as trainers send it."""
    given = push(made, step, part)._asdict()
    names = ("trainer", "step", "part", "finite", "norm", "seen", "epoch", "unread", "skipped")
    arrays = {"dense": given["dense"], "sums": given["sums"], "statistics": given["statistics"], "rows": given["ids"]}
    desk.handlers[EXCHANGE](encode(exchange_schemas(Toy())[0], {name: given[name] for name in names} | {"push": 1}, arrays))


def run(made: Serving, desk: Desk, steps: int) -> None:
    """All pushes of some steps, in order, and the steps; the last ones may not be merged yet."""
    for step in range(steps):
        made.step(ticket(step), None)
        for part in range(made.shares):
            send(made, desk, step, part)


@pytest.mark.parametrize("mode", [Mode.sync, Mode.async_, Mode.half_async])
def test_a_server_that_was_killed_needs_nothing_again_that_it_acknowledged(mode: Mode, tmp_path: Path) -> None:
    whole, desk = server(tmp_path / "whole", mode)
    run(whole, desk, 4)
    whole.settle()
    run(*server(tmp_path / "killed", mode), 4)
    again, again_desk = server(tmp_path / "killed", mode)
    for step in range(4):
        again.step(ticket(step), None)  # waits for trainers if anything is missing
    again.settle()
    assert learnt(again) == learnt(whole) and again.ledger.opened == 0
    told = [[(step, ids.tolist()) for step, ids in made.consumed()] for made in (whole, again)]
    assert told[0] == told[1] and len(told[0]) == 4 * whole.shares
    send(again, again_desk, 3, 0)
    assert again.dropped == 1


def test_what_is_missing_is_granted_again(tmp_path: Path) -> None:
    killed, desk = server(tmp_path, Mode.sync)
    run(killed, desk, 2)
    send(killed, desk, 2, 1)
    again, again_desk = server(tmp_path, Mode.sync)
    again.step(ticket(0), None)
    again.step(ticket(1), None)
    again.step(ticket(2), None)
    again.ledger.join(0, 0.0)
    assert [lease.key for lease in again.ledger.grant(0, 9)] == [(0, 2, 0)]
    send(again, again_desk, 2, 0)
    again.settle()
    assert again.holdings.applied == 3


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_server_of_a_run_goes_on_where_it_was(mode: str, servers: int, run_dtf: Any, tmp_path: Path) -> None:
    words = [*BASE, f"strategy.mode={mode}", f"strategy.servers={servers}", "strategy.min_block=1", "strategy.wal=true", "checkpoint.every_steps=1000", "checkpoint.keep_best=0"]
    words += ["step.clip_norm=0"]
    whole = run_dtf(*words)
    killed = run_dtf(*words, "recipe=dawdling", "observer=[jsonl,hitman]", f"observer.hitman.orders=['7:{servers - 1}:SIGKILL']")
    assert whole.code == killed.code == 0, killed.err
    assert visits(killed.folder) == THRICE
    if mode == "sync":
        assert bits(whole.folder) == bits(killed.folder)
