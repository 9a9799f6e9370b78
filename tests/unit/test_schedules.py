"""Pipeline schedules: complete, free of deadlock, with the length and memory that their sources state."""

from __future__ import annotations

import pytest

from dtf.strategies.pipeline.schedules import Schedule, answers, bubble, in_flight, order, rounds

CASES = [(ranks, virtual, m) for ranks in (1, 2, 3, 4) for virtual in (1, 2, 3) for m in (1, 2, 3, 4, 5, 8, 9)]


@pytest.mark.parametrize("schedule", list(Schedule), ids=lambda s: s.name)
@pytest.mark.parametrize(("ranks", "virtual", "m"), CASES)
def test_every_pass_once_in_order_without_deadlock(schedule: Schedule, ranks: int, virtual: int, m: int) -> None:
    length = rounds(schedule, ranks, virtual, m)  # or a deadlock
    for rank in range(ranks):
        for stage in range(rank, ranks * virtual, ranks):
            for forward in (True, False):
                passes = [
                    a.micro_batch
                    for a in order(schedule, rank, ranks, virtual, m)
                    if (a.forward, a.stage) == (forward, stage)
                ]
                assert passes == list(range(m)), "gradients add up in the order of the micro-batches"
    least = 2 * (virtual * m + ranks - 1)  # the bubble is (p - 1) / (v m + p - 1)
    assert length == least if m % ranks == 0 or virtual == 1 else length >= least


@pytest.mark.parametrize(
    ("ranks", "virtual", "m", "idle"),
    [
        (4, 2, 5, {"gpipe": 0.38, "1f1b": 0.31}),
        (4, 3, 5, {"gpipe": 0.38, "1f1b": 0.29}),
        (2, 2, 5, {"gpipe": 0.17, "1f1b": 0.13}),
    ],
)
def test_an_incomplete_group_of_micro_batches_makes_the_bubble_larger(
    ranks: int, virtual: int, m: int, idle: dict[str, float]
) -> None:
    assert {schedule.name: round(bubble(schedule, ranks, virtual, m), 2) for schedule in Schedule} == idle


@pytest.mark.parametrize(("ranks", "virtual", "m"), [case for case in CASES if case[0] > 1])
def test_an_answer_comes_after_what_it_answers(ranks: int, virtual: int, m: int) -> None:
    """The inputs of a stage tell which gradients the stage before has used; never more than have been sent, and in
    `1f1b` all but the last few.
    """
    for schedule in Schedule:
        for stage in range(1, ranks * virtual):
            told = answers(order(schedule, (stage - 1) % ranks, ranks, virtual, m))
            sent = waiting = 0
            for forward, s, j in order(schedule, stage % ranks, ranks, virtual, m):
                if s == stage and forward:
                    assert told[stage - 1, j] <= sent
                    waiting = sent - told[stage - 1, j]
                elif s == stage:
                    sent, waiting = sent + 1, waiting + 1
                    assert schedule is Schedule["gpipe"] or virtual > 1 or waiting <= 2 or j + ranks > m


@pytest.mark.parametrize(("ranks", "virtual", "m"), CASES)
def test_one_forward_one_backward_bounds_memory(ranks: int, virtual: int, m: int) -> None:
    held = [in_flight(Schedule["1f1b"], stage, ranks, virtual, m) for stage in range(ranks * virtual)]
    assert all(in_flight(Schedule["gpipe"], stage, ranks, virtual, m) == m for stage in range(ranks * virtual))
    if virtual == 1:
        assert held == [min(m, ranks - stage) for stage in range(ranks)]
    assert max(held) <= min(m, 2 * ranks)


@pytest.mark.parametrize(("ranks", "virtual", "m"), [(2, 2, 4), (4, 2, 8), (3, 2, 6), (4, 3, 4)])
def test_interleaving_follows_the_published_order(ranks: int, virtual: int, m: int) -> None:
    """The first rank's warm-up of Narayanan et al. 2021, figure 4: groups of p micro-batches through each
    of its stages in turn.
    """
    first = [(a.stage, a.micro_batch) for a in order(Schedule["1f1b"], 0, ranks, virtual, m) if a.forward]
    assert first[: 2 * ranks] == [(0, j) for j in range(ranks)] + [(ranks, j) for j in range(ranks)]
