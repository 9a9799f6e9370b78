"""In which order the ranks of a pipeline compute the micro-batches of a step: pure lists, nothing runs here."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

Schedule = Enum("Schedule", {"gpipe": "gpipe", "1f1b": "1f1b"})
"""`gpipe`: all forward passes, then all backward passes. `1f1b`: a backward pass as soon as there is one to do."""


class Action(NamedTuple):
    forward: bool  # else backward
    stage: int
    micro_batch: int


def order(schedule: Schedule, rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """What `rank` does; it holds the stages rank, rank + ranks, ...: `virtual` of them.

    Forward and backward passes of each stage go through the micro-batches from the first to the last. With several stages per rank, micro-batches
    go round in groups of `ranks`; when they do not divide, the last group is smaller. Sources: Huang et al. 2019 (arXiv:1811.06965);
    Narayanan et al. 2021, section 2.2 (arXiv:2104.04473).
    """
    rounds = -(-micro_batches // ranks) * ranks if virtual > 1 else micro_batches
    total = rounds * virtual
    forwards = [_turn(k, True, rank, ranks, virtual) for k in range(total)]
    backwards = [_turn(k, False, rank, ranks, virtual) for k in range(total)]
    if schedule is Schedule["gpipe"]:
        ahead = total
    else:  # so many forward passes before the first backward pass; one more follows at once
        ahead = min(total, ranks - 1 - rank if virtual == 1 else (virtual - 1) * ranks + 2 * (ranks - 1 - rank))
    found = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        found += [forward, backward]
    found += backwards[total - ahead :]
    return [action for action in found if action.micro_batch < micro_batches]


def in_flight(schedule: Schedule, stage: int, ranks: int, virtual: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once."""
    held = most = 0
    for action in order(schedule, stage % ranks, ranks, virtual, micro_batches):
        if action.stage == stage:
            held += 1 if action.forward else -1
            most = max(most, held)
    return most


def _turn(k: int, forward: bool, rank: int, ranks: int, virtual: int) -> Action:
    """The k-th forward or backward pass of a rank."""
    if virtual == 1:
        return Action(forward, rank, k)
    chunk = k // ranks % virtual
    chunk = chunk if forward else virtual - 1 - chunk
    return Action(forward, chunk * ranks + rank, k // (ranks * virtual) * ranks + k % ranks)
