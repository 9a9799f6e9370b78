"""The loop under a coordinator that grants, withholds, grants again and stops: a parameter server needs no second
loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.leased_work import LeasedWork
from dtf.api.lr import Constant
from dtf.api.strategy import Program, Source
from dtf.core.errors import DataError, DivergedError, DtfError
from dtf.core.types import Batch, Evaluate, Evaluated, Log, Poll, Save, Shard, State, StepOutput, Stop, Ticket, Train
from dtf.data.batches import Epochs
from dtf.data.samplers import Sequential
from dtf.engine import loop as engine
from dtf.engine.clock import Clock, Plan, PlannedClock
from dtf.engine.loop import Loop, fit
from dtf.engine.unreadable_rows import UnreadableRows
from tests.support.toy import Toy


class FakeProgram(Program):
    shard = Shard(0, 1)

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, list[int]]] = []
        self.bad = 0
        self.synced = 0

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        assert batch is not None
        self.steps.append((ticket.step, ticket.lr, batch.ids.tolist()))
        return StepOutput(torch.tensor([2.0, 1.0, 1.0]), torch.tensor([3.0, 1.0]))

    def eval_step(self, batch: Batch | None) -> Evaluated:
        assert batch is not None
        return Evaluated(torch.tensor([len(batch.ids), 1.0, 1.0]), None)

    def sync(self) -> None:
        self.synced += 1

    def state(self) -> State:
        return State([], {})

    def load(self, source: Source) -> None: ...

    def skipped(self) -> int:
        return self.bad


class FakeBatches:
    batches, prefetch, unread, allowed = 2, 0, 0, 0

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []

    def get(self, epoch: int, index: int) -> Batch:
        self.fetched.append((epoch, index))
        return Batch(torch.zeros(2), torch.zeros(2), torch.ones(2), np.array([2 * index, 2 * index + 1]))

    def ahead(self, keys: list[tuple[int, int]]) -> None: ...

    def bad(self, epoch: int) -> int:
        return self.unread

    def reading(self) -> dict[str, float]:
        return {}


class Coordinator(Clock):
    """Grants what the test puts into the queue; a queue with nothing in it withholds."""

    def __init__(self) -> None:
        self.granted: SimpleQueue[Ticket] = SimpleQueue()
        self.finished: list[tuple[Ticket, Mapping[str, float]]] = []
        self.coming: list[Train] = []

    def __next__(self) -> Ticket:
        return self.granted.get(timeout=10)

    def ahead(self, count: int) -> list[Train]:
        return self.coming[:count]

    def done(self, ticket: Ticket, values: Mapping[str, float]) -> None:
        self.finished.append((ticket, values))

    def state(self) -> dict:
        return {}

    @property
    def objective(self) -> str:
        return "top1"

    @property
    def best(self) -> None:
        return None


class SingleRank:
    rank = 0

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class Saver:
    mirror_s = 0.0

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.finished = False

    def ready(self) -> None: ...

    def layer(self, whole: bool) -> int | None:
        return None

    def save(self, step: int, state: State, scalars: dict, value: float | None, told: Any, check: Any) -> None:
        check()
        self.saved.append(step)
        told(f"step_{step}", 0.0, 0.0)

    def finish(self, hurried: bool = False) -> None:
        self.finished = True


def make(clock: Clock, **changes: Any) -> Any:
    """A loop over fakes; Any, because tests look at what the fakes saw."""
    values: dict[str, Any] = {
        "program": FakeProgram(),
        "train": FakeBatches(),
        "evaluation": FakeBatches(),
        "evaluation_rows": 4,
        "saver": Saver(),
    }
    fixed: dict[str, Any] = {
        "clock": clock,
        "recipe": Toy(),
        "world": SingleRank(),
        "see": lambda event: None,
        "scalars": {},
        "steps_per_epoch": 10,
    }
    return Loop(**(values | fixed | changes))


def grant(step: int) -> Train:
    return Train(step, step // 2, step % 2, 2, 0.5 / (step + 1))


def test_granted_again_and_out_of_order_tickets_run_as_granted() -> None:
    clock = Coordinator()
    for ticket in (grant(0), grant(3), grant(1), grant(3), Stop(4, "finished")):
        clock.granted.put(ticket)
    clock.coming = [grant(3)]  # a guess that is right, then wrong
    loop = make(clock)
    stop, _ = fit(loop)
    assert stop == Stop(4, "finished")
    assert [(step, ids) for step, _, ids in loop.program.steps] == [(0, [0, 1]), (3, [2, 3]), (1, [2, 3]), (3, [2, 3])]
    assert [t for t, _ in clock.finished] == [grant(0), grant(3), grant(1), grant(3)]


def test_withheld_tickets_make_the_loop_wait() -> None:
    clock = Coordinator()
    loop = make(clock)
    ended: list[Stop] = []
    thread = Thread(target=lambda: ended.append(fit(loop)[0]))
    thread.start()
    clock.granted.put(grant(0))
    while not clock.finished:  # the ticket is taken and done; nothing else is granted
        thread.join(0.001)
    assert thread.is_alive() and len(loop.program.steps) == 1
    clock.granted.put(grant(1))
    clock.granted.put(Stop(2, "finished"))
    thread.join(10)
    assert ended == [Stop(2, "finished")] and len(loop.program.steps) == 2


def test_evaluate_and_save_are_tickets_like_others() -> None:
    clock = Coordinator()
    for ticket in (grant(0), Log(1), Evaluate(1), Save(1), Stop(1, "early_stop")):
        clock.granted.put(ticket)
    loop = make(clock)
    _, evaluated = fit(loop)
    assert evaluated == {"loss": 0.5, "top1": 0.5} and loop.saver.saved == [1] and loop.saver.finished
    values = {type(t).__name__: v for t, v in clock.finished}
    assert values["Log"]["grad_norm"] == 3.0 and values["Evaluate"] == evaluated


def test_an_evaluation_that_loses_a_row_is_an_error() -> None:
    clock = Coordinator()
    clock.granted.put(Evaluate(0))
    with pytest.raises(DtfError, match="4 of 5 rows"):
        fit(make(clock, evaluation_rows=5))


def test_unreadable_rows_of_an_evaluation_are_counted_and_bounded() -> None:
    clock = Coordinator()
    clock.granted.put(Evaluate(0))
    clock.granted.put(Stop(0, "finished"))
    few, many = FakeBatches(), FakeBatches()
    few.unread, few.allowed = 1, 1
    fit(make(clock, evaluation=few, evaluation_rows=5))  # four were counted
    many.unread, many.allowed = 2, 1
    clock.granted.put(Evaluate(0))
    with pytest.raises(DataError, match="2 evaluation rows cannot be read, recipe.data.bad_share allows 1"):
        fit(make(clock, evaluation=many, evaluation_rows=6))


def test_unreadable_rows_beyond_the_budget_end_the_run_at_a_poll() -> None:
    clock = Coordinator()
    batches = FakeBatches()
    batches.unread, batches.allowed = 3, 2
    for ticket in (grant(0), Poll(1)):
        clock.granted.put(ticket)
    with pytest.raises(DataError, match="3 training rows cannot be read"):
        fit(make(clock, train=batches))


def judged(unread: Mapping[int, int], *tickets: Ticket) -> None:
    """Follow the tickets with so many unreadable rows of epochs, of which two are allowed."""
    clock, batches = Coordinator(), FakeBatches()
    batches.allowed, batches.bad = 2, lambda epoch: unread.get(epoch, 0)
    for ticket in tickets:
        clock.granted.put(ticket)
    fit(make(clock, train=batches))


def test_unreadable_rows_of_each_epoch_are_judged_by_themselves() -> None:
    tickets = *(Train(step, epoch, step % 2, 2, 0.1) for step, epoch in enumerate((0, 0, 1, 2))), Poll(4)
    judged({0: 2, 1: 1, 2: 2}, *tickets, Stop(4, "finished"))
    for epoch in range(3):
        with pytest.raises(DataError, match="3 training rows cannot be read"):
            judged({epoch: 3}, *tickets)


def test_no_run_ends_with_unreadable_rows_that_nobody_judged() -> None:
    for epoch in (0, 1):
        with pytest.raises(DataError, match="3 training rows cannot be read"):
            judged({epoch: 3}, Train(0, 0, 0, 2, 0.1), Train(1, 1, 0, 2, 0.1), Stop(2, "early_stop"))


def test_rows_of_an_epoch_are_judged_once_more_when_it_is_over_and_then_forgotten() -> None:
    """Servers hear late of the rows of a step: a poll may come before them."""
    rows = UnreadableRows(FakeBatches(), LeasedWork())  # type: ignore[arg-type]
    for epoch in range(50):
        rows.trained(epoch)
        assert len(rows.here()) == min(2, epoch + 1), "the numbers that ranks add up grow with the run"
        rows.judge(rows.here())
    rows.judge(rows.here())
    assert rows.here() == []


def test_divergence_is_found_before_a_save() -> None:
    clock = Coordinator()
    clock.granted.put(grant(0))
    clock.granted.put(Save(1))
    loop = make(clock)
    loop.program.bad = 1
    with pytest.raises(DivergedError, match="skip_nonfinite=0"):
        fit(loop)
    assert loop.saver.saved == []


def test_the_pace_counts_the_steps_of_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run starts at a high step: were its pace divided by that, the next poll would be hundreds of steps
    away.
    """
    seconds = count(0, 10)
    monkeypatch.setattr("dtf.engine.loop.time.perf_counter", lambda: next(seconds))
    clock = Coordinator()
    for ticket in (grant(400), grant(401), Poll(402), Stop(402, "preempted")):
        clock.granted.put(ticket)
    fit(make(clock))
    (pace,) = [values["step_seconds"] for ticket, values in clock.finished if isinstance(ticket, Poll)]
    assert pace >= 5


class Overflowing(FakeProgram):
    """Its loss scale lets no update be made before the step `until`."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.until = until

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        output = super().step(ticket, batch)
        return output if ticket.step >= self.until else output._replace(grad_norm=torch.zeros(2))


@pytest.mark.parametrize("log_every", [0, 1, 2])
def test_a_run_whose_loss_scale_lets_no_update_be_made_diverged(log_every: int) -> None:
    def run(program: FakeProgram, state: dict | None = None, **changes: Any) -> Stop:
        return fit(
            make(
                PlannedClock(Plan(4, log_every, 0, 2), Epochs(Sequential(), 4, 2, 0), Constant(), state),
                program=program,
                **changes,
            )
        )[0]

    with pytest.raises(DivergedError, match="overflowed in each of the 4 steps"):
        run(Overflowing(4))
    assert run(Overflowing(1)).reason == run(Overflowing(3)).reason == "finished"
    resumed = {"step": 3, "best": None, "best_step": 0, "since_best": 0}
    assert run(Overflowing(4), resumed, updated=True).reason == "finished", (
        "the scale was too large once more, after updates had been made"
    )
    with pytest.raises(DivergedError):
        run(Overflowing(4), resumed)


def test_steps_that_nothing_is_known_of_yet_are_told_of_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of nothing, and the lines together tell of every step."""

    class Late(FakeProgram):
        """Reports a step when the second one after it is made, and all that are left when it syncs."""

        def __init__(self) -> None:
            super().__init__()
            self.begun = self.reported = self.known = 0
            self.leased = Rest(self)

        def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
            self.begun += 1
            return self.report(max(0, self.begun - 2))

        def sync(self) -> None:
            self.known = self.begun

        def report(self, until: int) -> StepOutput:
            steps, self.reported = until - self.reported, until
            return StepOutput(torch.tensor([2.0, 1.0, 1.0]) * steps, torch.tensor([3.0, 1.0]) * steps)

    class Rest(LeasedWork):
        def __init__(self, program: Late) -> None:
            self.program = program

        def rest(self) -> StepOutput:
            return self.program.report(max(self.program.reported, self.program.known))

    monkeypatch.setattr(engine.Stopwatch, "lap", lambda self: 1.0)
    seen: list[Any] = []
    clock = PlannedClock(Plan(5, 1, 0, 0), Epochs(Sequential(), 4, 2, 0), Constant(), None)
    fit(make(clock, program=Late(), see=seen.append))
    assert [measured.step for measured in seen] == [3, 4, 5]
    assert all(math.isfinite(value) for measured in seen for value in measured.values.values())
    assert [measured.values["rows_per_s"] for measured in seen] == [2.0, 2.0, 6.0]
