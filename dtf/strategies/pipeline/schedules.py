"""The order in which the ranks of a pipeline compute the micro-batches of a step. Pure functions."""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum
from typing import NamedTuple

Schedule = Enum("Schedule", {"gpipe": "gpipe", "1f1b": "1f1b"})
"""`gpipe`: all forward passes, then all backward passes. `1f1b`: a backward pass as soon as there is one to do."""


class Action(NamedTuple):
    forward: bool  # else backward
    stage: int
    micro_batch: int


def order(schedule: Schedule, rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """The actions of `rank` in order. It holds the stages rank, rank + ranks, ...: `virtual` of them.

    Forward and backward passes of each stage go through the micro-batches from the first to the last. With several
    stages per rank, micro-batches go round in groups of `ranks`; when they do not divide, the last group is smaller.
    Sources: Huang et al. 2019 (arXiv:1811.06965); Narayanan et al. 2021, section 2.2 (arXiv:2104.04473).
    """
    rounds = -(-micro_batches // ranks) * ranks if virtual > 1 else micro_batches
    total = rounds * virtual
    forwards = [_turn(k, True, rank, ranks, virtual) for k in range(total)]
    backwards = [_turn(k, False, rank, ranks, virtual) for k in range(total)]
    if schedule is Schedule["gpipe"]:
        ahead = total
    else:  # so many forward passes before the first backward pass; one more follows at once
        ahead = min(total, ranks - 1 - rank if virtual == 1 else (virtual - 1) * ranks + 2 * (ranks - 1 - rank))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    actions += backwards[total - ahead :]
    return [action for action in actions if action.micro_batch < micro_batches]


def answers(actions: list[Action]) -> dict[tuple[int, int], int]:
    """(stage, micro-batch) of a rank's forward passes -> the number of backward passes of that stage before it.

    The rank that receives the output of such a forward pass knows that these are done.
    """
    done: Counter[int] = Counter()
    counts = {}
    for forward, stage, j in actions:
        if forward:
            counts[stage, j] = done[stage]
        else:
            done[stage] += 1
    return counts


def in_flight(schedule: Schedule, stage: int, ranks: int, virtual: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once."""
    held = most = 0
    for action in order(schedule, stage % ranks, ranks, virtual, micro_batches):
        if action.stage == stage:
            held += 1 if action.forward else -1
            most = max(most, held)
    return most


def rounds(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> int:
    """Rounds that the ranks need when every pass takes one, a rank waiting for what its next pass needs."""
    last, todo = (
        ranks * virtual - 1,
        [deque(order(schedule, rank, ranks, virtual, micro_batches)) for rank in range(ranks)],
    )
    ends: dict[Action, int] = {}
    clocks = [0] * ranks
    while any(todo):
        before = len(ends)
        for rank, actions in enumerate(todo):
            while actions and all(need in ends for need in _needs(actions[0], last)):
                action = actions.popleft()
                clocks[rank] = ends[action] = 1 + max([clocks[rank], *(ends[need] for need in _needs(action, last))])
        assert len(ends) > before, f"deadlock before {[actions[0] for actions in todo if actions]}"
    return max(clocks)


def bubble(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> float:
    """Share of the time in which a rank idles, for passes of equal length and messages that cost nothing.

    (p - 1) / (v m + p - 1), for p ranks with v stages each and m micro-batches, where v is 1 or p divides m: Narayanan
    et al. 2021, section 2.2, there relative to the time of work.
    """
    return 1 - 2 * virtual * micro_batches / rounds(schedule, ranks, virtual, micro_batches)


def _needs(action: Action, last: int) -> list[Action]:
    """What other passes must be done before this one; those of the same rank are in order anyway."""
    forward, stage, j = action
    if forward:
        return [Action(True, stage - 1, j)] if stage else []
    return [Action(True, stage, j), *([Action(False, stage + 1, j)] if stage < last else [])]


def _turn(k: int, forward: bool, rank: int, ranks: int, virtual: int) -> Action:
    """The k-th forward or backward pass of a rank."""
    if virtual == 1:
        return Action(forward, rank, k)
    chunk = k // ranks % virtual
    chunk = chunk if forward else virtual - 1 - chunk
    return Action(forward, chunk * ranks + rank, k // (ranks * virtual) * ranks + k % ranks)
