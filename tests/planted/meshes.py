"""Faults in positions that ranks divide, and in what a run on a device mesh goes on from."""

from __future__ import annotations

from tests.planted.fault import Fault

NUMBERS = "tests/laws/test_positions.py::test_a_language_model_has_the_same_numbers"
CUT = "tests/laws/test_positions.py::test_slices_are_cut_and_joined_with_their_gradients"
GOES_ON = "tests/laws/test_mesh.py::test_the_same_mesh_goes_on_bit_for_bit"
COUNTED = "tests/laws/test_positions.py::test_positions_that_a_block_counts_itself_are_refused_before_the_first_step"
SOME_AND_ALL = (
    "tests/laws/test_positions.py::test_a_parameter_of_some_positions_and_of_all_is_refused_whichever_stages_use_it"
)
REFUSED = "tests/laws/test_corner_case_models.py::test_refused_with_the_reason"

FAULTS = [
    Fault(
        "attention sees the positions of its own rank alone",
        "dtf/strategies/tensor_parallel/exchanged_attention.py",
        "        if func is not functional.scaled_dot_product_attention:\n",
        "        if True:\n",
        (f"{NUMBERS}[2-options0]",),
    ),
    Fault(
        "gradients of norms between divided layers are those of one rank's positions",
        "dtf/strategies/mesh_sharding.py",
        '    add([i for i, (name, _) in enumerate(trained) if name in partial_names], "tensor")\n',
        "",
        (f"{NUMBERS}[2-options1]",),
    ),
    Fault(
        "gradients are not summed over positions",
        "dtf/strategies/mesh_sharding.py",
        "        add(everything, *COPIES)\n",
        '        add(everything, "replicate")\n',
        (f"{NUMBERS}[2-options0]",),
    ),
    Fault(
        "dropout between divided layers draws for the first positions",
        "dtf/model/seeded_dropout.py",
        "            mask = mask.narrow(axis, first, last - first)\n",
        "            mask = mask.narrow(axis, 0, last - first)\n",
        (f"{NUMBERS}[2-options1]",),
    ),
    Fault(
        "dropout by functions draws for the positions of its rank alone",
        "dtf/model/seeded_calls.py",
        "        return self._masks.part_of(self._name, shape)\n",
        "        return None\n",
        (f"{NUMBERS}[2-options0]",),
    ),
    Fault(
        "dropout behind the positions draws for those of all ranks alike",
        "dtf/strategies/tensor_parallel/positions.py",
        "        self._divided = ends and self._context is not None\n",
        "        self._divided = False\n",
        (f"{NUMBERS}[4-options2]",),
    ),
    Fault(
        "dropouts of positions that ranks divide otherwise train",
        "dtf/model/seeded_dropout.py",
        "alike, (everywhere, by_layer, tolerance) = part is None,",
        "alike, (everywhere, by_layer, tolerance) = False,",
        ("tests/laws/test_positions.py::test_dropout_of_unknown_positions_is_refused_before_the_first_step",),
    ),
    Fault(
        "tensors of one norm are taken to be alike",
        "dtf/model/fingerprint.py",
        "found[:-1] += (sums * rows).sum(1)",
        "found[:-1] += numbers.square().sum()",
        ("tests/unit/test_projections.py::test_elements_in_other_places_show_and_rounding_does_not",),
    ),
    Fault(
        "losses of divided positions are those of one rank",
        "dtf/model/losses.py",
        "        return total(torch.cat([begin, part, end], 1), self.group)\n",
        "        return torch.cat([begin, part, end], 1)\n",
        (f"{NUMBERS}[2-options0]",),
    ),
    Fault(
        "each rank keeps a buffer of its own positions",
        "dtf/strategies/replica.py",
        "                    self.positions.refuse_changed(changed(), self.scratch)\n",
        "                    pass\n",
        ("tests/laws/test_positions.py::test_a_buffer_of_some_positions_is_refused",),
    ),
    Fault(
        "a rank with one position has attention without a causal mask",
        "dtf/strategies/tensor_parallel/exchanged_attention.py",
        "        elif width > 1:",
        "        elif False:",
        (f"{CUT}[2]",),
    ),
    Fault(
        "each rank adds the masks of the first heads",
        "dtf/strategies/tensor_parallel/exchanged_attention.py",
        "        return mask.narrow(-3, first, last - first)\n",
        "        return mask.narrow(-3, 0, last - first)\n",
        (f"{CUT}[2]",),
    ),
    Fault(
        "attention of one rank's positions trains",
        "dtf/strategies/tensor_parallel/exchanged_attention.py",
        "        exchange.check()\n",
        "",
        ("tests/laws/test_positions.py::test_attention_that_nobody_knows_is_refused_before_the_first_step",),
    ),
    Fault(
        "a model is compared as it starts alone",
        "dtf/strategies/output_reference.py",
        "            self._numbers.append(_Numbers.others(model))",
        "            self._numbers.append(_Numbers())",
        (
            COUNTED,
            f"{REFUSED}[penalised-tensor-options7-gives other outputs than the whole model]",
        ),
    ),
    Fault(
        "a model is not compared with the whole one",
        "dtf/strategies/output_reference.py",
        "        if error <= (TF32 if",
        "        if True or error <= (TF32 if",
        (f"{REFUSED}[penalised-tensor-options7-gives other outputs than the whole model]",),
    ),
    Fault(
        "the gradient of gathered positions is not summed",
        "dtf/distributed/collectives.py",
        "        return _scattered(gradient, ctx.axis, ctx.group, what), None, None, None, None\n",
        "        return _own(gradient, ctx.axis, ctx.group), None, None, None, None\n",
        (f"{CUT}[2]",),
    ),
    Fault(
        "a slice of one row is a view of the whole",
        "dtf/distributed/collectives.py",
        "last - first).clone(memory_format=torch.contiguous_format)\n",
        "last - first).contiguous()\n",
        (f"{CUT}[2]",),
    ),
    Fault(
        "stages are asked one by one which parameters are of some positions and of all",
        "dtf/strategies/pipeline/setup.py",
        "        partial_parameters(model, layout.positions)  # so",
        "        pass  # so",
        (SOME_AND_ALL,),
    ),
    Fault(
        "slices of divided layers are missing in a checkpoint",
        "dtf/strategies/mesh_sharding.py",
        'dims.place["replicate"] == dims.place["context"] == 0',
        'dims.place["replicate"] == dims.place["context"] == dims.place["tensor"] == 0',
        (f"{GOES_ON}[slices of divided layers]",),
    ),
    Fault(
        "running averages of stages begin anew",
        "dtf/strategies/pipeline/program.py",
        "        for stage in self._stages.values():\n            load_buffers(",
        "        for stage in ():\n            load_buffers(",
        (f"{GOES_ON}[stages of slices]",),
    ),
    Fault(
        "a run that goes on is cut anew",
        "dtf/strategies/pipeline/planner.py",
        "json.loads(known[key]) if key in known else ",
        "",
        ("tests/laws/test_pipeline.py::test_a_run_that_goes_on_has_the_plan_of_its_first_start",),
    ),
]
