"""Faults along the axes of a device mesh, and where two of them meet."""

from __future__ import annotations

from tests.planted.fault import Fault

MESH = "tests/laws/test_mesh.py::"
NUMBERS = f"{MESH}test_every_mesh_follows_the_reference_in_fp64"
ACROSS = f"{MESH}test_meshes_with_what_reaches_across_axes"
AGAIN = f"{MESH}test_the_same_mesh_goes_on_bit_for_bit"
TIED = f"{MESH}test_tied_weights_in_slices_of_stages[{{'pipeline': 2}}-function-tied]"
SCALAR = "tests/laws/test_corner_case_models.py::test_trains_as_in_one_process[gain-fsdp-4-options17]"
SKIPS = "tests/laws/test_update.py::test_a_gradient_that_is_infinite_on_another_rank_skips_the_step_here"

DIMS = "dtf/distributed/device_mesh.py"
SUMS = "dtf/strategies/mesh_sharding.py"
SLICES = "dtf/strategies/fully_sharded.py"
SETUP = "dtf/strategies/pipeline/setup.py"
PROGRAM = "dtf/strategies/pipeline/program.py"

REPLICATE = [
    Fault(
        "copies do not sum their gradients",
        SUMS,
        "        add(everything, *COPIES)\n",
        '        add(everything, "context")\n',
        (f"{NUMBERS}[copies of divided layers]",),
    ),
    Fault(
        "copies of slices sum their gradients once more",
        SUMS,
        '        add(everything, "context")\n',
        "        add(everything, *COPIES)\n",
        (f"{NUMBERS}[copies of slices]",),
    ),
    Fault(
        "copies of slices do not sum their gradients",
        SLICES,
        "root.set_requires_all_reduce(last)",
        "root.set_requires_all_reduce(False)",
        (f"{NUMBERS}[copies of slices]",),
    ),
    Fault(
        "stages are sliced, and their copies forgotten",
        SETUP,
        'sharding.wrap(segment, dims.mesh["replicate", "shard"], world)',
        'sharding.wrap(segment, dims.mesh["shard"], world)',
        (f"{NUMBERS}[copies of stages of slices]",),
    ),
    Fault(
        "copies do not sum the gradients of scalars, which have no slices",
        SUMS,
        "        add(whole, *ROWS)\n",
        '        add(whole, "shard")\n',
        (SCALAR,),
    ),
    Fault(
        "every copy writes a checkpoint",
        SUMS,
        'writes=dims.place["replicate"] == dims.place["context"] == 0',
        'writes=dims.place["context"] == 0',
        (f"{NUMBERS}[copies of stages]",),
    ),
    Fault(
        "the gradient norm counts every copy",
        DIMS,
        'SLICES = ("shard", "context", "tensor")\n',
        'SLICES = ("replicate", "shard", "context", "tensor")\n',
        (f"{NUMBERS}[copies of divided layers]",),
    ),
    Fault(
        "running statistics are averaged over slices, not over copies",
        DIMS,
        "_add(flat, self._rows).div_(self.dp_shard.count)",
        '_add(flat, self.group("shard")).div_(self.sizes.shard)',
        (f"{NUMBERS}[copies of divided layers]",),
    ),
    Fault(
        "copies of a stage are not compared",
        PROGRAM,
        "slice {self._dims.layer_rank}.{place['shard']}\", local",
        "slice {self._dims.layer_rank}.{place['shard']}.{place['replicate']}\", local",
        ("tests/laws/test_replica_digests.py::test_a_stage_that_differs_from_its_copy_is_found",),
    ),
]

SHARD = [
    Fault(
        "a share of the rows is told by the rank alone",
        DIMS,
        'Shard(self.place["replicate"] * sizes.shard + self.place["shard"], sizes.shares)',
        "Shard(world.rank * sizes.shares // world.size, sizes.shares)",
        (f"{NUMBERS}[stages of slices]",),
    ),
    Fault(
        "the second stage of ZeRO leaves out the gradient of the last micro-batch",
        SLICES,
        "root.set_requires_gradient_sync(last or zero > 1)",
        "root.set_requires_gradient_sync(last if zero != 2 else not last)",
        (f"{NUMBERS}[slices on three]",),
    ),
    Fault(
        "the second stage of ZeRO holds whole gradients",
        SLICES,
        "root.set_requires_gradient_sync(last or zero > 1)",
        "root.set_requires_gradient_sync(last or zero > 2)",
        (f"{MESH}test_two_ranks_hold_halves_of_what_the_stage_of_zero_says[2]",),
    ),
    Fault(
        "a slice of a divided parameter is placed as if there were no division",
        "dtf/distributed/sharding.py",
        "part, begin = divided or whole(tensor.shape), offset(tensor)",
        "part, begin = whole(tensor.shape), offset(tensor)",
        (f"{NUMBERS}[slices of divided layers]",),
    ),
    Fault(
        "a slice of a slice forgets where that one begins",
        "dtf/distributed/sharding.py",
        "piece.offset[axis] + begin - piece.at[axis]",
        "begin",
        ("tests/unit/test_sharding.py::test_a_slice_takes_its_ranges_and_a_part_of_it_rows_of_these",),
    ),
    Fault(
        "the gradient norm is that of one slice of each parameter",
        DIMS,
        'SLICES = ("shard", "context", "tensor")\n',
        'SLICES = ("context", "tensor")\n',
        (f"{NUMBERS}[slices of divided layers]",),
    ),
    Fault(
        "every slice counts a scalar in the gradient norm",
        "dtf/strategies/sharded_init.py",
        '(is_dtensor(parameter) or not place["shard"])',
        "True",
        (SCALAR,),
    ),
    Fault(
        "without a norm to clip, slices do not tell each other of an infinite gradient",
        "dtf/optim/update.py",
        "        if sum_slices is not None:\n            norms = sum_slices",
        "        if sum_slices is not None and self._clip:\n            norms = sum_slices",
        (SKIPS,),
    ),
    Fault(
        "shares go on with the running statistics of the first one",
        "dtf/strategies/buffers.py",
        'take(f"{SHARE}{shard.index}/{name}", name, held)',
        'take(f"{SHARE}0/{name}", name, held)',
        (f"{AGAIN}[slices of divided layers]",),
    ),
]

PIPELINE = [
    Fault(
        "each stage clips by its own norm",
        SETUP,
        "        return dims.total_of_stages(everyone)\n",
        "        return everyone\n",
        (f"{NUMBERS}[three stages]",),
    ),
    Fault(
        "without a norm to clip, stages do not tell each other of an infinite gradient",
        "dtf/optim/update.py",
        "vector_norm(norms if all_norms is None else",
        "vector_norm(norms if all_norms is None or not self._clip else",
        (SKIPS,),
    ),
    Fault(
        "the norm counts a tied weight once for each stage that has it",
        SETUP,
        "counted = [i for i, key in enumerate(trained) if key not in elsewhere]",
        "counted = [*range(len(trained))]",
        (
            "tests/laws/test_pipeline_shared.py::test_what_several_stages_use_is_updated_alike[modules-2-options6-more6]",
        ),
    ),
    Fault(
        "gradients of a tied weight are summed over neighbours, which compute other rows",
        SETUP,
        'dims.rank_lists("pipeline"), world.rank, trained\n',
        'dims.rank_lists("shard"), world.rank, trained\n',
        (TIED,),
    ),
    Fault(
        "running statistics of stages learn from padding",
        PROGRAM,
        "                stage.statistics.begin_padding()\n",
        "                stage.statistics.begin_micro_batch(0)\n",
        (f"{ACROSS}[interleaved-uneven]",),
    ),
    Fault(
        "padding before the rows of stages moves their dropout masks",
        PROGRAM,
        "stage.masks.begin_micro_batch(ticket.step, first + max(0, j - ahead))",
        "stage.masks.begin_micro_batch(ticket.step, first + j)",
        (f"{ACROSS}[interleaved-uneven]",),
    ),
    Fault(
        "running statistics of stages are those of one share",
        PROGRAM,
        "                stage.statistics.average(self._dims.average)\n",
        "                pass\n",
        (f"{NUMBERS}[copies of stages]",),
    ),
    Fault(
        "every share writes the buffers of a stage",
        PROGRAM,
        "for stage in self._stages.values() if share.index == 0 else ():",
        "for stage in self._stages.values():",
        (f"{NUMBERS}[copies of stages]",),
    ),
]

TENSOR = [
    Fault(
        "the gradient norm counts what is whole once for each slice of a layer",
        "dtf/strategies/sharded_init.py",
        'and (name in divided or not place["tensor"])',
        "",
        (f"{NUMBERS}[divided stages]",),
    ),
    Fault(
        "norms of the optimizer count what is whole once for each slice of a layer",
        "dtf/optim/update.py",
        "counts = {name: self._shards[name].is_primary for name in owned_names}",
        "counts = dict.fromkeys(owned_names, True)",
        (f"{ACROSS}[slices of divided layers-lars]",),
    ),
    Fault(
        "every rank of a layer reports the rows that it trained",
        "dtf/strategies/spmd.py",
        "return StepOutput(self._counted_once(sums),",
        "return StepOutput(sums,",
        (f"{NUMBERS}[copies of divided layers]",),
    ),
    Fault(
        "every rank of a stage reports the rows that it trained",
        PROGRAM,
        "return StepOutput(self._counted_once(sums),",
        "return StepOutput(sums,",
        (f"{NUMBERS}[divided stages]",),
    ),
    Fault(
        "every rank of a layer gives its rows to the evaluator",
        "dtf/strategies/spmd.py",
        "rows if self._reads else None)",
        "rows)",
        (f"{NUMBERS}[copies of divided layers]",),
    ),
    Fault(
        "every rank of a stage gives its rows to the evaluator",
        PROGRAM,
        "rows = None if self._dims.layer_rank else evaluated.rows",
        "rows = evaluated.rows",
        (f"{NUMBERS}[divided stages]",),
    ),
    Fault(
        "every rank of the last stage adds the counts of a loss",
        PROGRAM,
        "self._dims.total_of_stages(self.flow.counts.double().reshape(1))",
        "self._dims.total(self.flow.counts.double().reshape(1))",
        ("tests/laws/test_loss_forms.py::test_combined_with_each_other",),
    ),
    Fault(
        "every rank of the first stage sends gradients of rows of tables",
        SETUP,
        "gives=dims.reads",
        "gives=True",
        (f"{ACROSS}[stages of slices of divided layers-tables]",),
    ),
    Fault(
        "running statistics of a share are saved as if no layer were divided",
        "dtf/strategies/buffers.py",
        "tensor, whole[name], divided.get(name))",
        "tensor, whole[name], None)",
        (f"{AGAIN}[slices of divided layers]",),
    ),
]

FAULTS = [*REPLICATE, *SHARD, *PIPELINE, *TENSOR]
