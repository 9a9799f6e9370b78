"""Where to cut a chain of blocks into stages: the cut whose slowest stage is fastest, and what to expect of it.

Torch-free, measures nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Literal

from dtf.core.errors import ConfigError
from dtf.core.text import count_text

InFlight = Callable[[int], int] | Sequence[int]
"""Stage -> micro-batches whose forward pass is done and whose backward pass is not, at most."""


class TooLarge(ConfigError):
    """No cut fits into the memory of a stage; the best one needs `least_bytes`."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Cost:
    """Of one block, and one full micro-batch."""

    name: str
    work: float
    """Of the forward and the backward pass: seconds, or floating-point operations."""
    state_bytes: int
    """Parameters, gradients and optimizer state."""
    activation_bytes: int
    """What the block makes and keeps until its backward pass."""
    boundary_bytes: int
    """What crosses a cut after the block; a stage keeps what it received until its backward pass."""
    again_bytes: int = 0
    """What its backward pass computes again, to have it once more until it is done."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Those of `state_bytes` that are of a parameter which other blocks use too, by its name: a stage has it once."""
    uncut: str = ""
    """Why no stage can end with the block; empty: one can."""


def partition(costs: Sequence[Cost], stages: int, in_flight: InFlight, memory_bytes: int = 0) -> list[int]:
    """Bounds, (stages + 1), of the runs of blocks whose largest work is least, and among those the ones with the least
    bytes across cuts. None ends with a block that is `uncut`.

    The memory of each stage, see `memory`, is at most `memory_bytes` (0: no bound). Exact: dynamic programming over
    (stage, first block), O(stages x blocks^2). Raises ConfigError when there is no such cut.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ConfigError(f"{count} blocks do not make {stages} stages; use {f'1 to {count}' if count > 1 else 1}")
    works, held = _work_of_runs(costs), _held(in_flight, stages)

    def need(stage: int, first: int, last: int) -> float:
        return math.inf if last < count and costs[last - 1].uncut else memory(costs, first, last, held[stage])

    @cache
    def work(stage: int, first: int, last: int) -> float:
        fits = need(stage, first, last) <= (memory_bytes or sys.maxsize)
        return works[first][last - first - 1] if fits else math.inf

    least, _ = _best(count, stages, work, max)
    if least == math.inf:
        smallest, _ = _best(count, stages, need, max)
        if smallest == math.inf:
            raise ConfigError(next(cost.uncut for cost in costs if cost.uncut))
        raise TooLarge(
            f"no cut of {count} blocks into {stages} stages fits into {human(memory_bytes)} per stage; the least that "
            f"one needs is {human(smallest)}: "
            "allow that, or use more stages, smaller micro-batches or fewer of them in flight",
            int(smallest),
        )

    def crossing(stage: int, first: int, last: int) -> float:
        if work(stage, first, last) > least:
            return math.inf
        return costs[last - 1].boundary_bytes if last < count else 0

    return _best(count, stages, crossing, lambda first, rest: first + rest)[1]


def memory(costs: Sequence[Cost], first: int, last: int, in_flight: int) -> int:
    """Bytes that a stage of blocks [first, last) holds."""
    received = costs[first - 1].boundary_bytes if first else 0
    run = costs[first:last]
    kept = in_flight * (received + sum(cost.activation_bytes for cost in run))
    state = sum(cost.state_bytes - sum(cost.shared.values()) for cost in run)
    state += sum({name: size for cost in run for name, size in cost.shared.items()}.values())
    return state + kept + max((cost.again_bytes for cost in run), default=0)


def imbalance(costs: Sequence[Cost], bounds: Sequence[int]) -> float:
    """By how much the work of the largest stage exceeds the mean, as a share of the mean."""
    works = [sum(cost.work for cost in costs[first:last]) for first, last in pairwise(bounds)]
    return max(works) * len(works) / sum(works) - 1 if any(works) else 0.0


def table(
    costs: Sequence[Cost],
    bounds: Sequence[int],
    places: Sequence[int],
    in_flight: InFlight,
    micro_batches: int,
    bubble: float,
    unit: Literal["time", "FLOPs"],
    column: Literal["rank", "place"] = "rank",
) -> str:
    """The stages, their imbalance and the bubble as text of several lines. `places`: of each stage in a pipeline;
    `bubble`: see schedules.
    """
    total = sum(cost.work for cost in costs) or 1.0
    stages = len(bounds) - 1
    rows = [("stage", column, "blocks", unit, "memory")]
    for stage, ((first, last), held) in enumerate(zip(pairwise(bounds), _held(in_flight, stages), strict=True)):
        names = costs[first].name if last - first == 1 else f"{costs[first].name} .. {costs[last - 1].name}"
        share = sum(cost.work for cost in costs[first:last]) / total
        rows.append((str(stage), str(places[stage]), names, f"{share:.1%}", human(memory(costs, first, last, held))))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    left = (False, False, True, False, False)
    lines = [
        "  ".join(
            cell.ljust(w) if to_left else cell.rjust(w) for cell, w, to_left in zip(row, widths, left, strict=True)
        )
        for row in rows
    ]
    largest = max(costs, key=lambda cost: cost.work)
    bound = max(0.0, largest.work / total * stages - 1)
    return "\n".join(
        [
            *lines,
            f"imbalance {imbalance(costs, bounds):.1%} (largest stage over the mean), predicted bubble {bubble:.1%} "
            f"with {count_text(micro_batches, 'micro-batch')}",
            f"largest block {largest.name} with {largest.work / total:.1%}"
            + (f": no cut into {stages} stages has an imbalance below {bound:.1%}" if bound else ""),
        ]
    )


def human(count: float) -> str:
    """Bytes as text: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _best(
    count: int, stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least cost of a cut of `count` blocks into `stages` runs, and its bounds; of equal cuts the earliest.

    `cost(stage, first, last)`: of one run. `join`: the cost of a run and of those after it.
    """
    # rest[first]: the best for the blocks from `first` on in the stages from the present one on, and where it ends the
    # present one.
    rest = [(math.inf, 0)] * count + [(0.0, 0)]
    ends: list[list[int]] = []
    for stage in reversed(range(stages)):
        now = [(math.inf, 0)] * (count + 1)
        after = stages - stage - 1
        for first in range(stage, count - after):
            lasts = [count] if not after else range(first + 1, count - after + 1)
            now[first] = min((join(cost(stage, first, last), rest[last][0]), last) for last in lasts)
        rest = now
        ends.insert(0, [last for _, last in now])
    bounds = [0]
    for end in ends:
        bounds.append(end[bounds[-1]])
    return rest[0][0], bounds


def _work_of_runs(costs: Sequence[Cost]) -> list[list[float]]:
    """[first][last - first - 1] -> work of blocks [first, last).

    Each is added up from its own first block, so that equal runs have equal sums.
    """
    works = []
    for first in range(len(costs)):
        sums, total = [], 0.0
        for cost in costs[first:]:
            total += cost.work
            sums.append(total)
        works.append(sums)
    return works


def _held(in_flight: InFlight, stages: int) -> list[int]:
    return [in_flight(stage) if callable(in_flight) else in_flight[stage] for stage in range(stages)]
