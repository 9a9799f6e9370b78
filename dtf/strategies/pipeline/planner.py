"""Where the ranks of a pipeline cut the model: rank 0 plans, all ranks take its plan."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch
from torch import nn

from dtf.api.layout import Layout
from dtf.api.options import Remat
from dtf.api.precision import Cast
from dtf.api.task import Task
from dtf.core.errors import ConfigError, LayoutError
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.forward import batch_norm_error, cast_floating, on_device
from dtf.model.init import DTYPES, layout_of
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.state_bytes import WHOLE, StateSlices, state_bytes
from dtf.optim.update import trial_update
from dtf.strategies.pipeline import cost_model, partition
from dtf.strategies.pipeline.flow_order import blocks_in_order, found_blocks_named
from dtf.strategies.pipeline.graph_split import GraphSplit
from dtf.strategies.sharded_init import cast_parts

EVEN = 0.05
"""By how much less imbalance blocks are cut inside, where more than one tensor may cross; measured times are not much
more exact.
"""


class PipelineSpec(NamedTuple):
    """What the stages of a model have to be."""

    ranks: int  # of a pipeline
    virtual: int  # stages on each
    micro_batches: int  # of a step
    bubble: float  # with so many, see schedules
    rows: int  # of a micro-batch
    in_flight: list[int]  # stage -> micro-batches whose activations it holds at most
    begins: list[str]  # the blocks with which the stages after the first begin; empty: choose
    timed: bool  # equal parts of time, else of floating-point operations
    memory_bytes: int  # of a rank, at most; 0: no bound
    inside: bool = True  # whether blocks may be cut inside
    slices: StateSlices = WHOLE  # of the state of a stage


def broadcast_plan(model: nn.Module, spec: PipelineSpec, task: Task, world: World) -> tuple[GraphSplit, list[int], str]:
    """The model (on meta) split into units, the bounds of its stages in them, and a table of the stages as text.

    A run that goes on has the plan of its first start. Collective. ConfigError on all ranks for a model that cannot be
    cut as `spec` says.
    """
    layout = layout_of(task.recipe, model)
    plan: dict[str, Any] = {}
    known, key = task.start_check.plans, f"pipeline: {spec}"
    if world.rank == 0:
        try:
            plan = json.loads(known[key]) if key in known else _plan(model, layout, spec, task, world)
        except ConfigError as error:
            plan = {"refused": str(error), "layout": isinstance(error, LayoutError)}
    plan = world.broadcast(plan)
    if "refused" in plan:
        raise (LayoutError if plan["layout"] else ConfigError)(plan["refused"])
    known[key] = json.dumps(plan)
    return GraphSplit(model, blocks_in_order(model, layout), plan["fine"]), plan["bounds"], plan["table"]


def _plan(model: nn.Module, layout: Layout, spec: PipelineSpec, task: Task, world: World) -> dict[str, Any]:
    """Rank 0's plan: `fine`, whether blocks are cut inside, `bounds` and `table`. ConfigError where there is none."""
    with found_blocks_named(layout):
        blocks = blocks_in_order(model, layout)
        GraphSplit(model, blocks)
    sample = _sample(spec, task, world)
    checkpointed = modules_to_checkpoint(task.recipe, model, layout, task.step.remat)
    stages = spec.ranks * spec.virtual
    places, unit = [s % spec.ranks for s in range(stages)], "time" if spec.timed else "FLOPs"
    column = "rank" if spec.ranks == world.size else "place"
    plan: dict[str, Any] = {}
    least = math.inf
    # what is cut inside cannot be computed again, nor compiled
    inside = spec.inside and not spec.begins and task.step.remat is Remat.none and not task.compiled
    refused: ConfigError | None = None  # by blocks as they are
    for fine in (False, True) if inside else (False,):
        try:
            split = GraphSplit(model, blocks, fine)
        except ConfigError:
            if not fine:
                raise
            break  # a block whose code cannot be followed is not cut inside
        try:
            costs = _costs(split, sample, spec, task, world, checkpointed)
            bounds = _bounds(blocks, costs, stages, spec)
        except ValueError as error:
            raise batch_norm_error(error, spec.rows) from error
        except ConfigError as error:
            refused = error
            continue
        imbalance = partition.imbalance(costs, bounds)
        if imbalance < least - EVEN:
            least, plan = imbalance, {"fine": fine, "bounds": bounds}
            plan["table"] = partition.table(
                costs, bounds, places, spec.in_flight, spec.micro_batches, spec.bubble, unit, column
            )
        if least <= EVEN:
            break
    if not plan and refused is not None:
        raise refused
    if spec.micro_batches == 1:
        plan["table"] += "\none micro-batch in flight: plain model parallelism, one rank works while the others wait"
    return plan


def _autocast(task: Task) -> torch.dtype | None:
    """The format of autocast, if the task uses it."""
    return DTYPES[task.precision.compute] if task.precision.cast is Cast.autocast else None


def _sample(spec: PipelineSpec, task: Task, world: World) -> Any:
    """The inputs of one micro-batch, as the model takes them."""
    assert task.sample is not None
    inputs = on_device(task.sample(spec.rows), world.device)
    return inputs if _autocast(task) else cast_floating(inputs, DTYPES[task.precision.compute])


def _costs(
    split: GraphSplit, sample: Any, spec: PipelineSpec, task: Task, world: World, checkpointed: list[str]
) -> list[partition.Cost]:
    """The cost of each unit of a split model: measured, or counted, as `spec.timed` says."""
    autocast = _autocast(task)

    def prepare(block: nn.Module) -> None:
        cast_parts(block, task.precision, computing=True)
        apply_activation_checkpointing(
            block, checkpointed, task.step.remat, SeededDropout(block, task.seed, world.device)
        )

    def held_bytes(block: nn.Module, name: str) -> int:
        return state_bytes(block, task.optimizer, task.precision, spec.slices, name)

    if not spec.timed:
        return cost_model.count(split, sample, held_bytes, autocast, prepare)
    return cost_model.measure(
        split, sample, held_bytes, autocast, prepare, trial_update(task.optimizer), spec.micro_batches
    )


def _bounds(
    blocks: tuple[tuple[str, ...], ...], costs: list[partition.Cost], stages: int, spec: PipelineSpec
) -> list[int]:
    """The first unit of each stage, and the number of units. `costs`: of each unit. ConfigError where none fit."""
    if len(costs) < spec.ranks:
        raise ConfigError(
            f"{len(costs)} blocks do not make stages for {spec.ranks} ranks; use a smaller strategy.degree "
            "(strategy.pipeline of a mesh), or fewer launcher.processes"
        )
    if len(costs) < stages:
        most = len(costs) // spec.ranks
        raise ConfigError(
            f"strategy.virtual={spec.virtual}: {len(costs)} blocks do not make {stages} stages; use "
            f"{f'1 to {most}' if most > 1 else 1}"
        )
    most = -(-spec.memory_bytes // spec.virtual)
    if not spec.begins:
        try:
            return partition.partition(costs, stages, spec.in_flight, most)
        except partition.TooLarge as error:
            key, more = "strategy.memory_gb", f"; a rank has {spec.virtual} such stages" if spec.virtual > 1 else ""
            needed = _gib(error.least_bytes * spec.virtual)
            raise ConfigError(
                f"{key}={spec.memory_bytes / 2**30:.4g}: {error}{more}; the least is {key}={needed}"
            ) from error
    bounds = _named(blocks, spec.begins)
    if uncut := next((costs[first - 1].uncut for first in bounds[1:-1] if costs[first - 1].uncut), ""):
        raise ConfigError(uncut)
    needs = [partition.memory(costs, bounds[s], bounds[s + 1], spec.in_flight[s]) for s in range(stages)]
    if most and max(needs) > most:
        given, needed = f"strategy.memory_gb={spec.memory_bytes / 2**30:.4g}", _gib(max(needs) * spec.virtual)
        raise ConfigError(
            f"strategy.cuts={spec.begins} makes a rank need more than {given}; cut elsewhere, or use "
            f"strategy.memory_gb={needed}"
        )
    return bounds


def _gib(count: int) -> str:
    """Bytes in GiB, rounded up, with about three digits."""
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
