"""The program of a device mesh without stages: every rank runs the whole model, or its part of each layer."""

from __future__ import annotations

from functools import partial

from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.distributed.world import World
from dtf.model.draw_by_name import draws_by_name
from dtf.model.init import layout_of, model_to_cut
from dtf.model.outside_tensors import refuse_held
from dtf.sparse.make_tables import tables_of
from dtf.strategies.ddp import Ddp
from dtf.strategies.fully_sharded import FullSharding
from dtf.strategies.mesh_options import MeshOptions
from dtf.strategies.mesh_sharding import mesh_sharding, sum_gradients
from dtf.strategies.output_reference import OutputReference
from dtf.strategies.own_memory import refuse_shared_memory
from dtf.strategies.replica import Replica
from dtf.strategies.sharded_init import cast_parts, draw, lay_out, param_shards, settle
from dtf.strategies.spmd import Spmd, microbatch_load
from dtf.strategies.tensor_parallel.divide import divide
from dtf.strategies.tensor_parallel.families import with_splits
from dtf.strategies.tensor_parallel.positions import Positions, check_positions


def mesh_program(strategy: MeshOptions, name: str, sizes: MeshSizes, task: Task, world: World) -> Program:
    """The program of a rank. `name`: of the strategy, for messages. Collective."""
    if sizes.replicate == world.size:  # copies of the whole model
        return Ddp(tables=strategy.tables).setup(task, world)
    model = model_to_cut(task)
    layout = with_splits(layout_of(task.recipe, model), model, task.recipe, name, sizes)
    by_name = draws_by_name(task.recipe)
    check_positions(layout, name, sizes, task)
    sharding = FullSharding(model, layout, strategy, name, task) if sizes.shard > 1 else None
    dims, exchange = ParallelDims(world, sizes), 0
    reference = OutputReference(model, task, dims, world)
    if sizes.tensor > 1:
        refuse_shared_memory(model, name, "strategy=ddp")
        refuse_held(model, name)
        if by_name and sharding is None:
            cast_parts(model, task.precision, computing=True)
        divide(model, layout.splits, dims.mesh["tensor"])
    positions = None
    if sizes.layer_ranks > 1 and layout.positions:
        positions = Positions(model, layout.positions, layout.splits, dims, ends=True)
    if sharding is not None:
        exchange = sharding.exchange([model], microbatch_load(task, sizes.shares)[0])
        masters = sharding.wrap(model, dims.mesh["replicate", "shard"], world)
    elif by_name:
        masters = lay_out(model, task.precision, world.device)
        draw(model, task, masters)
    else:
        masters = settle(model, task.precision, world.device)
    tables = tables_of(task, world, strategy.tables, gives=dims.reads)
    params = param_shards(model, masters, dims)
    sync = None
    if sharding is not None:
        sum_gradients([model])
        sync = sharding.gradient_sync([model])
    replica = Replica(model, task, world.device, sync=sync, layout=layout)
    replica.instead = strategy.one_share
    if positions is not None:
        replica.take_positions(positions)
    partial_names = () if positions is None else positions.partial
    compared = reference.compare(partial(replica.evaluated_outputs, narrow=False), [(model, {})], name)
    sharded = mesh_sharding([model], params, dims, tables, partial_names)
    program = Spmd(replica, sharded, task, world, dims, exchange, zero=strategy.zero)
    program.tell(compared)
    return program
