"""The program of a device mesh with stages: the model is cut, and each stage divided as the other axes say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from dtf.api.layout import Layout
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.data.batches import micro_batch_bounds
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.distributed.world import World
from dtf.model.activation_checkpointing import modules_to_checkpoint
from dtf.model.draw_by_name import draws_by_name
from dtf.model.init import formats, layout_of, model_to_cut
from dtf.model.outside_tensors import refuse_held
from dtf.optim.sharding import ParamShard, Sharding
from dtf.optim.state_bytes import StateSlices
from dtf.optim.update import LocalUpdate
from dtf.sparse.make_tables import tables_of
from dtf.strategies.fully_sharded import FullSharding
from dtf.strategies.mesh_options import Balance, MeshOptions
from dtf.strategies.mesh_sharding import mesh_sharding, sum_gradients
from dtf.strategies.output_reference import OutputReference
from dtf.strategies.own_memory import refuse_shared_memory
from dtf.strategies.pass_probes import refuse_hooks_on_sums
from dtf.strategies.pipeline.graph_split import refuse_hooks_of_root
from dtf.strategies.pipeline.messages import PipelineRanks, channels
from dtf.strategies.pipeline.planner import PipelineSpec, broadcast_plan
from dtf.strategies.pipeline.program import PipelineProgram
from dtf.strategies.pipeline.schedules import bubble, in_flight
from dtf.strategies.pipeline.shared_tensors import (
    RankTensors,
    SharedTensors,
    TiedGradients,
    Ties,
    check_formats,
    first_names,
    holders,
    refuse_gathered_twice,
    renamed,
)
from dtf.strategies.pipeline.stage import Stage
from dtf.strategies.sharded_init import cast_parts, draw, lay_out, param_shards, settle
from dtf.strategies.tensor_parallel.divide import divide, largest_shares
from dtf.strategies.tensor_parallel.families import with_splits
from dtf.strategies.tensor_parallel.positions import Positions, check_positions, partial_parameters

PER_RANK = 4
"""Micro-batches of a global batch for each rank of a pipeline, unless step.micro_batch_rows says otherwise: the bubble
is below a fifth.
"""


def pipeline_program(strategy: MeshOptions, name: str, sizes: MeshSizes, task: Task, world: World) -> PipelineProgram:
    """The program of a rank. `name`: of the strategy, for messages. Collective."""
    dims = ParallelDims(world, sizes, inputs=sizes.layer_ranks > 1)
    model = _checked_model(strategy, name, sizes, task)
    layout = with_splits(layout_of(task.recipe, model), model, task.recipe, name, sizes)
    rows, spec = _spec(strategy, sizes, model, layout, task)
    stages = spec.ranks * spec.virtual
    check_positions(layout, name, sizes, task)
    checkpointed = modules_to_checkpoint(task.recipe, model, layout, task.step.remat)
    reference = OutputReference(model, task, dims, world)
    split, bounds, table = broadcast_plan(model, spec, task, world)
    refuse_gathered_twice(model, split.uses, bounds, spec.ranks, sizes.shard)
    names = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    sharding = FullSharding(model, layout, strategy, name, task) if sizes.shard > 1 else None
    by_name, place = draws_by_name(task.recipe), dims.place["pipeline"]
    dtype = next(iter(formats(model, task.precision).values()))[1]
    if by_name and sharding is None:
        cast_parts(model, task.precision, computing=True)
    if sizes.tensor > 1:
        divide(model, layout.splits, dims.mesh["tensor"])
    segments = {s: split.segment(bounds[s], bounds[s + 1]) for s in range(place, stages, spec.ranks)}
    copies = holders(split.uses, bounds, spec.ranks)
    positions = _positions(model, segments, layout, dims, stages, world)
    exchange = sharding.exchange(segments.values(), spec.micro_batches) if sharding is not None else 0
    tensors = _StageTensors(model, segments, task)
    masters = tensors.fill(sharding, dims, world, by_name)
    elsewhere = frozenset(key for key, places in copies.items() if places[0] != place)
    params = tensors.shards(masters, dims)
    tables = tables_of(task, world, strategy.tables, gives=dims.reads)
    partial = {tensors.names[s][key] for s, found in positions.items() for key in found.partial}
    sharding_of = mesh_sharding([*segments.values()], params, dims, tables, partial)
    update = _update(task, world, dims, sharding_of, names, elsewhere, dtype, copies)
    shared = SharedTensors(tensors.names, elsewhere, {key: len(places) for key, places in copies.items()})
    parts, wrapped = [], set[str]()
    for s, segment in segments.items():
        again = [key for key in checkpointed if key not in wrapped]
        wrapped |= {key for key, _ in segment.named_modules()}
        parts.append(Stage(s, segment, task, world.device, again, layout.buffers, positions.get(s)))
        if sharding is not None:
            parts[-1].sync = sharding.gradient_sync([segment])
    program = PipelineProgram(
        parts,
        _pipeline_ranks(dims, stages, world),
        strategy,
        update,
        task,
        world,
        dims,
        rows,
        tables,
        shared,
        exchange,
    )
    own = [(segment, tensors.names[s]) for s, segment in segments.items()]
    compared = reference.compare(program.flow.evaluated_outputs, own, name)
    program.tell(compared | {"stages": table})
    return program


def _checked_model(strategy: MeshOptions, name: str, sizes: MeshSizes, task: Task) -> nn.Module:
    """The model. ConfigError for what stages of it cannot do."""
    model = model_to_cut(task)
    if sizes.shares > 1:
        refuse_hooks_on_sums(model, strategy.one_share)
    refuse_hooks_of_root(model)
    refuse_shared_memory(model, name, "strategy=ddp")
    refuse_held(model, name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    return model


def _pipeline_ranks(dims: ParallelDims, stages: int, world: World) -> PipelineRanks:
    """The pipeline that this rank is in. Collective."""
    chains = dims.rank_lists("pipeline")
    links = channels(chains, stages, world.rank, world.device)
    return PipelineRanks(next(ranks for ranks in chains if world.rank in ranks), dims.place["pipeline"], stages, *links)


def _positions(
    model: nn.Module,
    segments: Mapping[int, nn.Module],
    layout: Layout,
    dims: ParallelDims,
    stages: int,
    world: World,
) -> dict[int, Positions]:
    """Divide the positions in each stage of the model; all of them cross the cuts. Collective. ConfigError on all ranks
    where the last stage has none of the layout's modules, LayoutError for a parameter of some positions and of all.
    """
    if dims.sizes.layer_ranks == 1 or not layout.positions:
        return {}
    if dims.sizes.tensor > 1:
        partial_parameters(model, layout.positions)  # so that the cut does not say what is refused
    last = segments.get(stages - 1)
    lacks = last is not None and not {name for name, _ in last.named_modules()} & {*layout.positions}
    everyone = world.gather(lacks and dims.sizes.context > 1)
    if world.broadcast(everyone and any(everyone)):
        raise ConfigError(
            f"strategy.context={dims.sizes.context}: the last stage has none of the modules that the layout names in "
            f"positions ({layout.positions[-1]} is the last of them); let them reach to the outputs of the model"
        )
    return {
        s: Positions(segment, layout.positions, layout.splits, dims, s == stages - 1) for s, segment in segments.items()
    }


def _spec(
    strategy: MeshOptions, sizes: MeshSizes, model: nn.Module, layout: Layout, task: Task
) -> tuple[int, PipelineSpec]:
    """The rows of a micro-batch, and what the stages have to be."""
    ranks, shares, virtual = sizes.pipeline, sizes.shares, strategy.virtual
    # batch statistics need two rows
    count = max(shares, min(PER_RANK * ranks * shares, task.step.batch_size // 2))
    rows = task.step.rows_each(count)
    bounds = micro_batch_bounds(task.step.batch_size, rows)
    micro_batches = -(-(len(bounds) - 1) // shares)  # of one pipeline, at most
    spec = PipelineSpec(
        ranks,
        virtual,
        micro_batches,
        bubble(strategy.schedule, ranks, virtual, micro_batches),
        bounds[1],
        [in_flight(strategy.schedule, s, ranks, virtual, micro_batches) for s in range(ranks * virtual)],
        list(strategy.cuts),
        strategy.balance is Balance.time,
        math.ceil(strategy.memory_gb * 2**30),
        sizes.layer_ranks == 1,
        StateSlices(sizes.shard, strategy.zero, largest_shares(model, layout.splits, sizes.tensor)),
    )
    return rows, spec


class _StageTensors:
    """The tensors of this rank's stages, `segments`, cut out of `model`. `names`: see `SharedTensors`."""

    def __init__(self, model: nn.Module, segments: Mapping[int, GraphModule], task: Task) -> None:
        first = first_names(model)
        self.names = {s: renamed(segment, first) for s, segment in segments.items()}
        self._model, self._segments, self._task = model, segments, task

    def fill(
        self, sharding: FullSharding | None, dims: ParallelDims, world: World, by_name: bool
    ) -> dict[str, torch.Tensor]:
        """Give the stages their place, format, slices and numbers, in place. Returns master copies by first name."""
        ties, masters = Ties(self._segments.values()), dict[str, torch.Tensor]()
        for s, segment in self._segments.items() if not by_name else ():
            check_formats(self._model, segment, self.names[s], self._task.precision)
        self._drop_others()
        for s, segment in self._segments.items():
            if sharding is not None:
                made = sharding.wrap(segment, dims.mesh["replicate", "shard"], world)
            else:
                made = (lay_out if by_name else settle)(segment, self._task.precision, world.device)
            masters = {self.names[s][key]: master for key, master in made.items()} | masters
        if sharding is None:
            ties.join()
            if by_name:
                draw(self._tensors(), self._task, masters)
        else:
            sum_gradients(self._segments.values())
        return masters

    def _drop_others(self) -> None:
        """Let go of the tensors of other ranks."""
        kept = {module for segment in self._segments.values() for module in segment.modules()}
        for module in self._model.modules():
            if module not in kept:
                module._parameters.clear()
                module._buffers.clear()

    def shards(self, masters: Mapping[str, torch.Tensor], dims: ParallelDims) -> dict[str, ParamShard]:
        """What the update gets, by first name."""
        return param_shards(self._tensors(), masters, dims)

    def _tensors(self) -> RankTensors:
        return RankTensors((segment, self.names[s]) for s, segment in self._segments.items())


def _update(
    task: Task,
    world: World,
    dims: ParallelDims,
    sharding: Sharding,
    names: list[str],
    elsewhere: frozenset[str],
    dtype: torch.dtype,
    copies: Mapping[str, list[int]],
) -> LocalUpdate:
    """The update of this rank's stages. `names`: all trained parameters of the model, in its order."""
    shards = sharding.params
    trained = [key for key, shard in shards.items() if shard.parameter.requires_grad]
    counted = [i for i, key in enumerate(trained) if key not in elsewhere]
    own, positions = (
        torch.tensor(indices, dtype=torch.int64, device=world.device)
        for indices in (counted, [names.index(trained[i]) for i in counted])
    )

    def all_norms(norms: torch.Tensor) -> torch.Tensor:
        """Norms of all parameters in the model's order, whichever stage has them: the same bits for every cut."""
        everyone = norms.new_zeros(len(names))
        everyone[positions] = norms[own]
        return dims.total_of_stages(everyone)

    tied = TiedGradients(
        {key: copies[key] for key in names if key in copies}, dims.rank_lists("pipeline"), world.rank, trained
    )
    sharding = replace(
        sharding,
        params={
            key: shard._replace(is_primary=shard.is_primary and key not in elsewhere) for key, shard in shards.items()
        },
        complete_gradients=_both(sharding.complete_gradients, tied),
        all_norms=all_norms,
        like=torch.empty(0, dtype=dtype, device=world.device),
    )
    return LocalUpdate(sharding, task.optimizer, task.step.clip_norm, task.precision.loss_scale)


def _both(
    first: Callable[[list[torch.Tensor]], None] | None, then: Callable[[list[torch.Tensor]], None]
) -> Callable[[list[torch.Tensor]], None]:
    def complete(gradients: list[torch.Tensor]) -> None:
        if first is not None:
            first(gradients)
        then(gradients)

    return complete
