"""What the ranks of a device mesh send in a step, axis by axis, for the start-up table."""

from __future__ import annotations

from collections.abc import Sequence

from dtf.api.task import Task
from dtf.core.text import bytes_text, count_text
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.device_mesh import ROWS, ParallelDims
from dtf.distributed.grad_allreduce import buckets
from dtf.distributed.mesh_sizes import AXES
from dtf.distributed.sharding import byte_count
from dtf.distributed.traffic import Key, Sent, all_reduce_bytes
from dtf.distributed.world import World
from dtf.model.memory import Footprint

Trials = Sequence[tuple[int, Footprint]]
StepTraffic = dict[str, Sent]
"""Axis -> what a rank sends along it in a step."""


def step_passes(task: Task, dims: ParallelDims, micro_batch_rows: int) -> tuple[int, int]:
    """(passes, rows of all of them) of this rank in a step over a whole batch. Where parameters are gathered, all ranks
    make the same number of passes, some over padding.
    """
    bounds = micro_batch_bounds(task.step.batch_size, micro_batch_rows)
    first, last = micro_batches_of(len(bounds) - 1, dims.dp_shard)
    rows = [b - a for a, b in zip(bounds[first:last], bounds[first + 1 : last + 1], strict=True)]
    most = -(-(len(bounds) - 1) // dims.dp_shard.count)
    if dims.sizes.shard > 1 and len(rows) < most:
        rows = [*rows[:1], *rows] or [1]
    return len(rows), sum(rows)


def step_traffic(trials: Trials, dims: ParallelDims, passes: tuple[int, int], zero: int, tied: int = 0) -> StepTraffic:
    """What this rank sends in a step, from what two passes over fewer rows sent. `passes`: see `step_passes`. `tied`:
    bytes of gradients sent to other stages after the passes.

    Not counted: rows of a batch on their way to the ranks of a share, norms, and rows of sparse tables.
    """
    (few, first), (more, second) = trials
    count, rows = passes
    found: StepTraffic = {}
    for key, sent in second.traffic.sent.items():
        axis = _axis(key, dims)
        if axis in ROWS:  # of parameters and gradients: the same for any number of rows
            step = Sent().plus(sent, _times(key[0], axis, zero, count))
        else:
            less = first.traffic.sent.get(key, Sent()).bytes
            rate = (sent.bytes - less) / (more - few) if few < more else sent.bytes / more
            step = Sent(count * (sent.bytes - more * rate) + rows * rate, count * sent.calls)
        if step.bytes:
            found[axis] = found.get(axis, Sent()).plus(step)
    if tied:
        found["pipeline"] = found.get("pipeline", Sent()).plus(Sent(tied, 1))
    for axes, gradients in dims.summed:
        ranks = len(dims.rank_lists(*axes)[0])
        sums = Sent(all_reduce_bytes(byte_count(gradients), ranks), len(buckets(gradients)))
        axis = next(axis for axis in axes if dims.sizes.by_axis()[axis] > 1)
        found[axis] = found.get(axis, Sent()).plus(sums)
    return found


def _axis(key: Key, dims: ParallelDims) -> str:
    """The axis along which the ranks of a group differ: the first of several."""
    places = [dims.place_of(rank) for rank in key[1]]
    return next((axis for axis in AXES if len({place[axis] for place in places}) > 1), "")


def _times(kind: str, axis: str, zero: int, passes: int) -> int:
    """How often in a step there is what a pass, the last of a step, does for a slice of the parameters."""
    each = (kind == "all-gather" and zero == 3) or (kind == "reduce-scatter" and zero >= 2)
    return passes if each and axis == "shard" else 1


def mesh_rows(sent: StepTraffic, dims: ParallelDims, world: World) -> dict[str, str]:
    """Lines of the start-up table, on the first rank: the mesh, and what the rank sends that sends most along an axis.
    `sent`: of `step_traffic`. Collective.
    """
    everyone = [{axis: Sent(*one) for axis, one in told.items()} for told in world.gather(sent) or ()]
    most = {axis: max(one.get(axis, Sent()) for one in everyone) for axis in AXES if everyone}
    longer = {axis: size for axis, size in dims.sizes.by_axis().items() if size > 1}
    sizes = (f"{axis} {size} (ranks {_ranks(dims.rank_lists(axis)[0])})" for axis, size in longer.items())
    texts = (
        f"{axis} {bytes_text(round(one.bytes))} in {_calls(axis, one.calls)}" for axis, one in most.items() if one.bytes
    )
    return {"mesh": " x ".join(sizes), "sends": f"{', '.join(texts) or 'nothing'}; per rank and step, at most"}


def _ranks(ranks: list[int]) -> str:
    """Some neighbours along an axis: the first of its groups."""
    return " ".join(map(str, ranks if len(ranks) < 5 else [*ranks[:2], "..", ranks[-1]]))


def _calls(axis: str, calls: float) -> str:
    return count_text(round(calls), "message" if axis == "pipeline" else "collective")
