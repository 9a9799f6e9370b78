"""Pipeline schedules: complete, free of deadlock, with the length and memory that their sources state."""

from __future__ import annotations

import pytest

from dtf.schedules import Action, Schedule, in_flight, order

CASES = [(ranks, virtual, m) for ranks in (1, 2, 3, 4) for virtual in (1, 2, 3) for m in (1, 2, 3, 4, 5, 8, 9)]


def play(schedule: Schedule, ranks: int, virtual: int, m: int) -> int:
    """Rounds that the ranks need when every pass takes one, a rank waiting for what its next pass needs."""
    todo = [order(schedule, rank, ranks, virtual, m) for rank in range(ranks)]
    done: set[Action] = set()
    last, rounds = ranks * virtual - 1, 0
    while any(todo):
        now = []
        for actions in todo:
            if not actions:
                continue
            forward, stage, j = action = actions[0]
            needs = [Action(True, stage - 1, j)] if forward and stage else []
            if not forward:
                needs = [Action(True, stage, j)] + ([Action(False, stage + 1, j)] if stage < last else [])
            if all(need in done for need in needs):
                now.append(action)
                actions.pop(0)
        assert now, f"deadlock after {rounds} rounds: {[actions[0] for actions in todo if actions]}"
        done.update(now)
        rounds += 1
    assert len(done) == 2 * ranks * virtual * m
    return rounds


@pytest.mark.parametrize("schedule", list(Schedule), ids=lambda s: s.name)
@pytest.mark.parametrize(("ranks", "virtual", "m"), CASES)
def test_every_pass_once_in_order_without_deadlock(schedule: Schedule, ranks: int, virtual: int, m: int) -> None:
    rounds = play(schedule, ranks, virtual, m)
    for rank in range(ranks):
        for stage in range(rank, ranks * virtual, ranks):
            for forward in (True, False):
                passes = [a.micro_batch for a in order(schedule, rank, ranks, virtual, m) if (a.forward, a.stage) == (forward, stage)]
                assert passes == list(range(m)), "gradients add up in the order of the micro-batches"
    if m % ranks == 0 or virtual == 1:
        assert rounds == 2 * (virtual * m + ranks - 1), "the bubble is (p - 1) / (v m + p - 1)"


@pytest.mark.parametrize(("ranks", "virtual", "m"), CASES)
def test_one_forward_one_backward_bounds_memory(ranks: int, virtual: int, m: int) -> None:
    held = [in_flight(Schedule["1f1b"], stage, ranks, virtual, m) for stage in range(ranks * virtual)]
    assert all(in_flight(Schedule["gpipe"], stage, ranks, virtual, m) == m for stage in range(ranks * virtual))
    if virtual == 1:
        assert held == [min(m, ranks - stage) for stage in range(ranks)]
    assert max(held) <= min(m, 2 * ranks)


@pytest.mark.parametrize(("ranks", "virtual", "m"), [(2, 2, 4), (4, 2, 8), (3, 2, 6), (4, 3, 4)])
def test_interleaving_follows_the_published_order(ranks: int, virtual: int, m: int) -> None:
    """The first rank's warm-up of Narayanan et al. 2021, figure 4: groups of p micro-batches through each of its stages in turn."""
    first = [(a.stage, a.micro_batch) for a in order(Schedule["1f1b"], 0, ranks, virtual, m) if a.forward]
    assert first[: 2 * ranks] == [(0, j) for j in range(ranks)] + [(ranks, j) for j in range(ranks)]
