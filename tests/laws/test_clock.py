"""The clock of a fixed plan: its tickets in order, when ranks agree, early stops, and resuming."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dtf.api.lr import Constant, Plateau
from dtf.core.types import Evaluate, Log, Poll, Save, Stop, Ticket, Train
from dtf.data.batches import Epochs
from dtf.data.samplers import Sequential
from dtf.engine.clock import Plan, PlannedClock


def agreed(ticket: Ticket, step_seconds: float, stop_at: float = math.inf) -> dict[str, float]:
    """What ranks agree on at a ticket of a run that starts at step 0."""
    return {
        "stop_requests": float(ticket.step >= stop_at),
        "over_budget": 0.0,
        "step_seconds": step_seconds if ticket.step else math.inf,
        "spare_seconds": math.inf,
        "evaluation_seconds": 0.0,
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
        lrs = {}
        for ticket in clock:
            if isinstance(ticket, Train):
                lrs[ticket.step] = ticket.lr
            clock.done(ticket, {"loss": losses.get(ticket.step, 0.0), **agreed(ticket, 9.0)})
            if isinstance(ticket, Evaluate) and ticket.step == until:
                break
        return lrs

    whole = rates(PlannedClock(plan, epochs, Plateau(peak=8.0, factor=0.5)), 12)
    assert list(whole.values()) == [8.0] * 4 + [4.0] * 4 + [2.0] * 2 + [1.0] * 2
    broken = PlannedClock(plan, epochs, Plateau(peak=8.0, factor=0.5))
    first = rates(broken, 8)
    assert first | rates(PlannedClock(plan, epochs, Plateau(peak=8.0, factor=0.5), broken.state()), 12) == whole


def test_the_best_evaluation_is_saved_although_no_save_is_due() -> None:
    assert Save(3) in planned(save_best=True)
    assert Save(3) not in planned(save_best=False)


def test_between_whole_saves_there_are_those_of_changes() -> None:
    """Where both are due the save is whole; one for another reason has changes; the last one is whole."""
    every = {"delta_every": 1, "eval_every": 0, "log_every": 0}
    assert [(t.step, t.whole) for t in planned(**every) if isinstance(t, Save)] == [
        *((1, False), (2, False), (3, False), (4, True), (5, False), (6, True)),
    ]
    assert Save(3, whole=False) in planned(delta_every=2, save_best=True)


def polled(stop_at: int, step_seconds: float, log_every: int = 0) -> list[Ticket]:
    clock = PlannedClock(Plan(100, log_every, 0, 50), Epochs(Sequential(), 1000, 2, 0), Constant())
    tickets = []
    for ticket in clock:
        tickets.append(ticket)
        clock.done(ticket, agreed(ticket, step_seconds, stop_at))
    return tickets


def test_a_request_to_stop_is_heard_within_two_seconds_without_any_report() -> None:
    tickets = polled(stop_at=12, step_seconds=0.5)
    assert [t.step for t in tickets if isinstance(t, Poll)] == [0, 1, 5, 9, 13], (
        "a poll every two seconds, once the pace is known"
    )
    assert tickets[-2:] == [Save(13), Stop(13, "preempted")]
    assert polled(stop_at=12, step_seconds=30.0)[-3:] == [Poll(12), Save(12), Stop(12, "preempted")], (
        "slow steps: a poll each"
    )


def test_a_request_to_stop_while_it_starts_is_heard_before_the_first_step() -> None:
    assert polled(stop_at=0, step_seconds=0.5) == [Poll(0), Stop(0, "preempted")]


def test_ranks_agree_at_the_last_step_and_not_at_each_end_of_a_short_epoch() -> None:
    """A run may be shorter than the time between two polls, and an epoch shorter than a poll."""
    clock = PlannedClock(Plan(24, 0, 0, 0), Epochs(Sequential(), 7, 2, 0), Constant())
    polls = []
    for ticket in clock:
        polls += [ticket.step] if isinstance(ticket, Poll) else []
        clock.done(ticket, agreed(ticket, 0.001))
    assert polls == [0, 1, 5, 21, 24]


@pytest.mark.parametrize("plan", [Plan(30, 4, 3, 5), Plan(30, 0, 4, 0, patience=2), Plan(30, 7, 6, 4, save_best=True)])
def test_ranks_agree_before_a_step_is_kept_or_ends_the_run(plan: Plan) -> None:
    """A run must not end well, and no checkpoint be kept, with rows that nobody has judged."""
    agreed_at, seen = -1, 0
    for ticket in (clock := PlannedClock(plan, Epochs(Sequential(), 7, 2, 0), Constant())):
        if isinstance(ticket, Poll):
            agreed_at = ticket.step
        if isinstance(ticket, Evaluate | Save | Stop):
            assert agreed_at == ticket.step, ticket
            seen += 1
        clock.done(ticket, agreed(ticket, 0.001) | {"loss": float(ticket.step)})
    assert seen > 2


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
        clock.done(ticket, {"loss": 9.0} | agreed(ticket, 9.0))
    assert rest == whole[whole.index(Save(4)) + 1 :]
    assert clock.best == (3.0, 3)


def test_steps_that_are_open_at_once_tell_nothing_of_the_pace() -> None:
    """Servers open the first steps before trainers have made one."""
    clock = PlannedClock(Plan(5000, 0, 0, 0), Epochs(Sequential(), 10_000, 2, 0), Constant())
    polls = list[int]()
    for ticket in clock:
        clock.done(ticket, agreed(ticket, 1e-4 if ticket.step <= 1 else 0.25))
        polls += [ticket.step] * isinstance(ticket, Poll)
        if ticket.step > 30:
            break
    assert polls == [0, 1, 5, 13, 21, 29]
