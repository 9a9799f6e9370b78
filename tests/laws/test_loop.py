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

from dtf.api.lr import Constant, Plateau
from dtf.api.strategy import Program
from dtf.api.task import Source
from dtf.core.errors import DataError, DivergedError, DtfError
from dtf.core.types import Batch, Evaluate, Evaluated, Log, Poll, Save, Shard, State, StepOutput, Stop, Ticket, Train
from dtf.data.samplers import Epochs, Sequential
from dtf.engine import loop as engine
from dtf.engine.clock import Clock, Plan, PlannedClock
from dtf.engine.loop import Loop, fit
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


class Alone:
    rank = 0

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        return sums


class Saver:
    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, step: int, state: State, scalars: dict, value: float | None) -> str:
        self.saved.append(step)
        return f"step_{step}"


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
        "world": Alone(),
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
    assert evaluated == {"loss": 0.5, "top1": 0.5} and loop.saver.saved == [1]
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


def test_divergence_is_found_before_a_save() -> None:
    clock = Coordinator()
    clock.granted.put(grant(0))
    clock.granted.put(Save(1))
    loop = make(clock)
    loop.program.bad = 1
    with pytest.raises(DivergedError, match="skip_nonfinite=0"):
        fit(loop)
    assert loop.saver.saved == []


def agreed(ticket: Ticket, step_seconds: float, told_at: float = math.inf) -> dict[str, float]:
    """What ranks find out at a ticket of a run that starts at step 0."""
    return {
        "stop_requests": float(ticket.step >= told_at),
        "over_budget": 0.0,
        "step_seconds": step_seconds if ticket.step else math.inf,
    }


def planned(**changes: Any) -> list[Ticket]:
    options: dict[str, Any] = {"total": 6, "log_every": 2, "eval_every": 3, "save_every": 4} | changes
    plan = Plan(**options)
    clock = PlannedClock(plan, Epochs(Sequential(), 7, 2, 0), Constant())
    tickets = []
    for ticket in clock:
        tickets.append(ticket)
        clock.done(ticket, {"loss": float(ticket.step), **agreed(ticket, 9.0)})
    return [ticket for ticket in tickets if not isinstance(ticket, Poll)]


def test_a_plan_in_order() -> None:
    names = [f"{type(t).__name__}{t.step}" for t in planned()]
    assert names == [
        "Train0",
        "Train1",
        "Log2",
        "Train2",
        "Evaluate3",
        "Train3",
        "Log4",
        "Save4",
        "Train4",
        "Train5",
        "Log6",
        "Evaluate6",
        "Save6",
        "Stop6",
    ]


def test_early_stop_saves_and_stops_at_the_same_step_everywhere() -> None:
    tickets = planned(patience=1)  # the loss grows: the first evaluation is the best
    assert tickets[-3:] == [Evaluate(6), Save(6), Stop(6, "finished")]
    tickets = planned(patience=1, eval_every=2)
    assert [t for t in tickets if not isinstance(t, Train | Log)] == [
        Evaluate(2),
        Evaluate(4),
        Save(4),
        Stop(4, "early_stop"),
    ]


def test_the_rate_falls_where_evaluations_find_no_new_best_and_a_resumed_run_goes_on_from_there() -> None:
    losses = {2: 1.0, 4: 2.0, 6: 0.5, 8: 0.6, 10: 0.7}
    epochs, plan = Epochs(Sequential(), 7, 2, 0), Plan(12, 0, 2, 0)

    def rates(clock: PlannedClock, until: int) -> dict[int, float]:
        found = {}
        for ticket in clock:
            if isinstance(ticket, Train):
                found[ticket.step] = ticket.lr
            clock.done(ticket, {"loss": losses.get(ticket.step, 0.0), **agreed(ticket, 9.0)})
            if isinstance(ticket, Evaluate) and ticket.step == until:
                break
        return found

    whole = rates(PlannedClock(plan, epochs, Plateau(peak=8.0, factor=0.5)), 12)
    assert list(whole.values()) == [8.0] * 4 + [4.0] * 4 + [2.0] * 2 + [1.0] * 2
    broken = PlannedClock(plan, epochs, Plateau(peak=8.0, factor=0.5))
    first = rates(broken, 8)
    assert first | rates(PlannedClock(plan, epochs, Plateau(peak=8.0, factor=0.5), broken.state()), 12) == whole


def test_the_best_evaluation_is_saved_although_no_save_is_due() -> None:
    assert Save(3) in planned(save_best=True)
    assert Save(3) not in planned(save_best=False)


def polled(told_at: int, step_seconds: float, log_every: int = 0) -> list[Ticket]:
    clock = PlannedClock(Plan(100, log_every, 0, 50), Epochs(Sequential(), 1000, 2, 0), Constant())
    tickets = []
    for ticket in clock:
        tickets.append(ticket)
        clock.done(ticket, agreed(ticket, step_seconds, told_at))
    return tickets


def test_a_request_to_stop_is_heard_within_two_seconds_without_any_report() -> None:
    tickets = polled(told_at=12, step_seconds=0.5)
    assert [t.step for t in tickets if isinstance(t, Poll)] == [0, 1, 5, 9, 13], (
        "a poll every two seconds, once the pace is known"
    )
    assert tickets[-2:] == [Save(13), Stop(13, "preempted")]
    assert polled(told_at=12, step_seconds=30.0)[-3:] == [Poll(12), Save(12), Stop(12, "preempted")], (
        "slow steps: a poll each"
    )


def test_a_request_to_stop_while_it_starts_is_heard_before_the_first_step() -> None:
    assert polled(told_at=0, step_seconds=0.5) == [Poll(0), Stop(0, "preempted")]


def test_ranks_agree_at_each_end_of_an_epoch_and_at_the_last_step() -> None:
    """Rows that cannot be read are counted by the epoch, and a run may be shorter than the time between two polls."""
    clock = PlannedClock(Plan(6, 0, 0, 0), Epochs(Sequential(), 7, 2, 0), Constant())
    polls = []
    for ticket in clock:
        polls += [ticket.step] if isinstance(ticket, Poll) else []
        clock.done(ticket, agreed(ticket, 0.001))
    assert polls == [0, 1, 4, 6]


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
        """Tells of a step when the second one after it is made; of what is left when it settles."""

        def __init__(self) -> None:
            super().__init__()
            self.begun = self.told = self.known = 0

        def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
            self.begun += 1
            return self._tell(max(0, self.begun - 2))

        def sync(self) -> None:
            self.known = self.begun

        def rest(self) -> StepOutput:
            return self._tell(max(self.told, self.known))

        def _tell(self, until: int) -> StepOutput:
            steps, self.told = until - self.told, until
            return StepOutput(torch.tensor([2.0, 1.0, 1.0]) * steps, torch.tensor([3.0, 1.0]) * steps)

    monkeypatch.setattr(engine._Stopwatch, "lap", lambda self: 1.0)
    seen: list[Any] = []
    clock = PlannedClock(Plan(5, 1, 0, 0), Epochs(Sequential(), 4, 2, 0), Constant(), None)
    fit(make(clock, program=Late(), see=seen.append))
    assert [each.step for each in seen] == [3, 4, 5]
    assert all(math.isfinite(value) for each in seen for value in each.values.values())
    assert [each.values["rows_per_s"] for each in seen] == [2.0, 2.0, 6.0]


def test_an_early_stop_is_not_undone_by_starting_again() -> None:
    clock = PlannedClock(
        Plan(6, 0, 2, 2, patience=2),
        Epochs(Sequential(), 7, 2, 0),
        Constant(),
        {"step": 4, "best": 1.0, "best_step": 0, "since_best": 2},
    )
    assert list(clock) == [Stop(4, "early_stop")]


def test_a_plan_may_stop_short_and_go_on_as_if_it_had_not() -> None:
    first = planned(until=4)
    assert first[-2:] == [Save(4), Stop(4, "stopped")]
    whole = [t for t in planned() if isinstance(t, Train)]
    assert [t for t in first if isinstance(t, Train)] == whole[:4], "learning rates are those of the whole run"


def test_resuming_continues_the_plan() -> None:
    whole = planned()
    clock = PlannedClock(
        Plan(6, 2, 3, 4),
        Epochs(Sequential(), 7, 2, 0),
        Constant(),
        {"step": 4, "best": 3.0, "best_step": 3, "since_best": 0},
    )
    rest = []
    for ticket in clock:
        if not isinstance(ticket, Poll):
            rest.append(ticket)
        clock.done(ticket, {"loss": 9.0, "stop_requests": 0.0, "over_budget": 0.0, "step_seconds": 9.0})
    assert rest == whole[whole.index(Save(4)) + 1 :]
    assert clock.best == (3.0, 3)
