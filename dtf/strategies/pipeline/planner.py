"""Where the ranks of a pipeline cut the model: one of them looks, all of them agree."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn

from dtf.api.options import Remat
from dtf.api.precision import Cast
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.forward import batch_norm_error, cast_floating, inputs_to_device
from dtf.model.init import DTYPES, layout_of
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.update import state_bytes, warmup_bytes
from dtf.strategies.pipeline import cost_model, partition
from dtf.strategies.pipeline.graph_split import GraphSplit
from dtf.strategies.sharded_init import cast_on_meta

EVEN = 0.05
"""By how much less imbalance blocks are cut inside, where more than one tensor may cross; measured times are not much
more exact.
"""


class PipelineSpec(NamedTuple):
    """What stages are for."""

    ranks: int  # of a pipeline
    virtual: int  # stages on each
    micro_batches: int  # of a step
    bubble: float  # with so many, see schedules
    rows: int  # of a micro-batch
    in_flight: list[int]  # stage -> micro-batches whose activations it holds at most
    begins: list[str]  # the blocks with which the stages after the first begin; empty: choose
    timed: bool  # equal parts of time, else of floating-point operations
    memory_bytes: int  # of a rank, at most; 0: no bound


def broadcast_plan(model: nn.Module, wish: PipelineSpec, task: Task, world: World) -> tuple[GraphSplit, list[int], str]:
    """The model (on meta) as a chain, the bounds of its stages, and a table for people. Collective.

    ConfigError on all ranks for a model that cannot be cut like that.
    """
    blocks = layout_of(task.recipe, model).blocks
    found: dict[str, Any] = {}
    if world.rank == 0:
        try:
            found = _look(model, blocks, wish, task, world)
        except ConfigError as error:
            found = {"refused": str(error)}
    found = world.broadcast(found)
    if "refused" in found:
        raise ConfigError(found["refused"])
    return GraphSplit(model, blocks, found["fine"]), found["bounds"], found["table"]


def _look(
    model: nn.Module, blocks: tuple[tuple[str, ...], ...], wish: PipelineSpec, task: Task, world: World
) -> dict[str, Any]:
    assert task.sample is not None
    compute = DTYPES[task.precision.compute]
    autocast = compute if task.precision.cast is Cast.autocast else None
    inputs = inputs_to_device(task.sample(wish.rows), world.device)
    sample = inputs if autocast else cast_floating(inputs, compute)
    forgetful = modules_to_checkpoint(task.recipe, task.step.remat)

    def prepare(block: nn.Module) -> None:
        cast_on_meta(block, task.precision, computing=True)
        apply_activation_checkpointing(block, forgetful, task.step.remat, SeededDropout(block, task.seed, world.device))

    def held_bytes(block: nn.Module) -> int:
        return state_bytes(block, task.optimizer, task.precision)

    def look(chain: GraphSplit) -> list[partition.Cost]:
        if not wish.timed:
            return cost_model.count(chain, sample, held_bytes, autocast, prepare)
        return cost_model.measure(
            chain, sample, held_bytes, autocast, prepare, warmup_bytes(task.optimizer), wish.micro_batches
        )

    stages = wish.ranks * wish.virtual
    places, unit = [s % wish.ranks for s in range(stages)], "time" if wish.timed else "FLOPs"
    found: dict[str, Any] = {}
    least = math.inf
    inside = not wish.begins and task.step.remat is Remat.none  # what is cut inside cannot be computed again
    refused: ConfigError | None = None  # by blocks as they are
    for fine in (False, True) if inside else (False,):
        try:
            chain = GraphSplit(model, blocks, fine)
        except ConfigError:
            if not fine:
                raise
            break  # a block whose code cannot be followed is not cut inside
        try:
            each = look(chain)
            bounds = _bounds(blocks, each, stages, wish)
        except ValueError as error:
            raise batch_norm_error(error, wish.rows) from error
        except ConfigError as error:
            refused = error
            continue
        imbalance = partition.imbalance(each, bounds)
        if imbalance < least - EVEN:
            least, found = imbalance, {"fine": fine, "bounds": bounds}
            found["table"] = partition.table(
                each, bounds, places, wish.in_flight, wish.micro_batches, wish.bubble, unit
            )
        if least <= EVEN:
            break
    if not found and refused is not None:
        raise ConfigError(f"strategy=pipeline: {refused}")
    if wish.micro_batches == 1:
        found["table"] += "\none micro-batch in flight: plain model parallelism, one rank works while the others wait"
    return found


def _bounds(
    blocks: tuple[tuple[str, ...], ...], each: list[partition.Cost], stages: int, wish: PipelineSpec
) -> list[int]:
    if len(each) < wish.ranks:
        raise ConfigError(
            f"{len(each)} blocks do not make stages for {wish.ranks} ranks; use a smaller strategy.degree, or a "
            "smaller launcher.processes"
        )
    if len(each) < stages:
        most = len(each) // wish.ranks
        raise ConfigError(
            f"strategy.virtual={wish.virtual}: {len(each)} blocks do not make {stages} stages; use "
            f"{f'1 to {most}' if most > 1 else 1}"
        )
    most = -(-wish.memory_bytes // wish.virtual)
    if not wish.begins:
        try:
            return partition.partition(each, stages, wish.in_flight, most)
        except partition.TooLarge as error:
            key, more = "strategy.memory_gb", f"; a rank has {wish.virtual} such stages" if wish.virtual > 1 else ""
            needed = _gib(error.least_bytes * wish.virtual)
            raise ConfigError(
                f"{key}={wish.memory_bytes / 2**30:.4g}: {error}{more}; the least is {key}={needed}"
            ) from error
    bounds = _named(blocks, wish.begins)
    needs = [partition.memory(each, bounds[s], bounds[s + 1], wish.in_flight[s]) for s in range(stages)]
    if most and max(needs) > most:
        given, needed = f"strategy.memory_gb={wish.memory_bytes / 2**30:.4g}", _gib(max(needs) * wish.virtual)
        raise ConfigError(
            f"strategy.cuts={wish.begins} makes a rank need more than {given}; cut elsewhere, or use "
            f"strategy.memory_gb={needed}"
        )
    return bounds


def _gib(count: int) -> str:
    """So many bytes in GiB, rounded up to three digits or so."""
    return f"{1.005 * count / 2**30:.3g}"


def _named(blocks: tuple[tuple[str, ...], ...], begins: list[str]) -> list[int]:
    """Bounds of the stages that begin with the named blocks."""
    of = {name: index for index, block in enumerate(blocks) for name in block}
    first: list[int] = []
    for name in begins:
        if of.get(name, 0) <= (first[-1] if first else 0):
            why = (
                "which is no block after the first"
                if not of.get(name)
                else f"which does not come after {begins[len(first) - 1]}"
            )
            names = ", ".join(block[0] for block in blocks[1:])
            raise ConfigError(
                f"strategy.cuts={begins} names {name}, {why}; blocks are, in the order in which data flows, {names}"
            )
        first.append(of[name])
    return [0, *first, len(blocks)]
