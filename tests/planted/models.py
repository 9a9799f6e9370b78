"""Faults in what finds models that cannot be kept right: the check at the start, the watch of buffers, the proof of a
mean, and the comparison of replicas.
"""

from tests.planted.fault import Fault

DROPPED = "tests/laws/test_same_numbers.py::test_dropout_by_functions_of_torch_and_in_attention"

FAULTS = [
    Fault(
        "attention sees what comes later",
        "recipes/gpt/model.py",
        "dropout_p=dropout, is_causal=True)",
        "dropout_p=dropout)",
        ("tests/unit/test_gpt.py::test_a_place_sees_only_those_before_it",),
    ),
    Fault(
        "divided scores of tokens are summed over the tokens",
        "dtf/model/losses.py",
        "    sums = [shifted.exp().sum(dim=-1), slices.at(shifted, targets)]\n",
        "    sums = [shifted.exp().sum(dim=1), slices.at(shifted, targets)]\n",
        ("tests/laws/test_tensor_layers.py::test_what_is_in_no_table_and_no_class",),
    ),
    Fault(
        "all dropout functions of one call of a module draw one mask",
        "dtf/model/seeded_calls.py",
        "        return self._draws.factor(self._number, self.drawn - 1, x, p, shape)\n",
        "        return self._draws.factor(self._number, 0, x, p, shape)\n",
        ("tests/unit/test_seeded_calls.py::test_masks_follow_the_micro_batch_the_module_the_call_and_its_place",),
    ),
    Fault(
        "each rank drops from its heads what the first one drops",
        "dtf/model/seeded_calls.py",
        "mask.narrow(1, part.first, ",
        "mask.narrow(1, 0, ",
        ("tests/unit/test_seeded_calls.py::test_ranks_that_divide_heads_drop_what_one_drops",),
    ),
    Fault(
        "copies of a model in one process draw by functions as they like",
        "dtf/strategies/replica.py",
        "        seed_calls(self.model, self.masks, other.masks.dropping)\n",
        "",
        (f"{DROPPED}[dp-{{}}-2]",),
    ),
    Fault(
        "nobody looks whether a step has changed buffers",
        "dtf/model/changing_buffers.py",
        "            if now is not tensor or (now is not None and _version(now) != version):\n",
        "            if False:\n",
        ("tests/laws/test_buffers.py::test_a_change_that_only_some_batches_make_is_refused_before_that_update",),
    ),
    Fault(
        "the check at the start lets pass what depends on earlier rows",
        "dtf/strategies/start_check.py",
        "        if differ:\n",
        "        if False:\n",
        ("tests/laws/test_replica_digests.py::test_each_way_to_go_astray[always]",),
    ),
    Fault(
        "the check at the start lets pass ranks that differ",
        "dtf/strategies/start_check.py",
        "        elif any(numbers_differ(_sums(everyone[0][0]), _sums(one), bound) for one, *_ in everyone[1:]):\n",
        "        elif False:\n",
        ("tests/laws/test_authors_model.py::test_constructors_that_draw_apart_are_refused[ddp-]",),
    ),
    Fault(
        "counters are not moved ahead",
        "dtf/strategies/start_check.py",
        "            with _moved(trials, move):\n",
        "            with _moved(trials, None):\n",
        (
            "tests/laws/test_replica_digests.py::test_what_would_begin_later_is_found_before_the_first_step[counts-ddp-options1-2]",
        ),
    ),
    Fault(
        "evaluations are not checked at the start",
        "dtf/strategies/start_check.py",
        "    if not task.start_check.fresh:\n        return\n",
        "    return\n",
        (
            "tests/laws/test_replica_digests.py::test_what_would_begin_later_is_found_before_the_first_step[evaluated-ddp-options1-2]",
        ),
    ),
    Fault(
        "passes that try something take the rows themselves",
        "dtf/strategies/replica.py",
        "        part = with_leaves(self._received(copy_of(rows), 0, micro_batch), self._looked_up)\n",
        "        part = with_leaves(self._received(rows, 0, micro_batch), self._looked_up)\n",
        ("tests/zoo/test_zoo.py::test_the_same_numbers_or_a_clear_no[writes_into_its_rows-ddp-2]",),
    ),
    Fault(
        "gradients that are clipped count as linear",
        "dtf/strategies/start_check.py",
        '            return name\n    return ""\n',
        '            continue\n    return ""\n',
        ("tests/laws/test_start_check.py::test_what_the_check_found_is_remembered_too",),
    ),
    Fault(
        "every scalar counts as a mean over rows",
        "dtf/model/mean_proof.py",
        "    return weights > 0 and abs(total / weights - whole) <= bound\n",
        "    return mean is Mean.rows\n",
        ("tests/unit/test_mean_proof.py",),
    ),
    Fault(
        "a rank divides by the counts of its own rows",
        "dtf/strategies/spmd.py",
        "            self._average(counts)\n",
        "",
        ("tests/laws/test_loss_forms.py::test_every_strategy_follows_the_reference[ddp-{}-pair]",),
    ),
    Fault(
        "a replica forgets the counts of all micro-batches but the last",
        "dtf/strategies/replica.py",
        "            self.counts = loss.counts if self.counts is None else self.counts + loss.counts\n",
        "            self.counts = loss.counts\n",
        ("tests/laws/test_loss_forms.py::test_every_strategy_follows_the_reference[ddp-{}-pair]",),
    ),
    Fault(
        "ranks keep initial numbers of their own",
        "dtf/engine/initial_numbers.py",
        "        for name in unequal:\n            world.send",
        "        for name in ():\n            world.send",
        ("tests/unit/test_initial_numbers.py::test_numbers_that_differ_are_those_of_rank_0",),
    ),
    Fault(
        "replicas are not compared before a save",
        "dtf/strategies/replica_digests.py",
        "    if not unequal:\n        return\n",
        "    return\n",
        ("tests/laws/test_replica_digests.py::test_each_way_to_go_astray[parameter]",),
    ),
    Fault(
        "trial passes leave what they did to plain attributes",
        "dtf/model/attributes.py",
        "            self._contents.restore()\n",
        "",
        ("tests/unit/test_attributes.py",),
    ),
    Fault(
        "the trial of channels last compares no outputs of training",
        "dtf/model/memory_format.py",
        "    if not _same(trained.outputs, last_trained.outputs):\n",
        "    if False:\n",
        ("tests/laws/test_memory_format_choice.py::test_what_auto_chooses_changes_no_number[dropout]",),
    ),
    Fault(
        "the trial of channels last compares no gradients",
        "dtf/model/memory_format.py",
        "    if module is not None:\n",
        "    if False:\n",
        ("tests/laws/test_memory_format_choice.py::test_what_auto_chooses_changes_no_number[strided_backward]",),
    ),
    Fault(
        "zeros hide what comes before them from the trial of channels last",
        "dtf/model/memory_format.py",
        "        if not parameter.any():\n",
        "        if False:\n",
        ("tests/laws/test_memory_format_choice.py::test_what_auto_chooses_changes_no_number[hidden_dropout]",),
    ),
    Fault(
        "the trial of channels last takes the statistics of two rows",
        "dtf/model/memory_format.py",
        "            module.training = False\n",
        "            module.training = training\n",
        ("tests/unit/test_memory_format.py::test_networks_of_torchvision_bear_channels_last[mobilenet_v2-32]",),
    ),
    Fault(
        "channels first are as the data have them",
        "dtf/model/memory_format.py",
        "    return leaf.contiguous() if _is_image(leaf) else leaf\n",
        "    return leaf\n",
        ("tests/laws/test_memory_format_choice.py::test_what_auto_chooses_changes_no_number[viewed_backward]",),
    ),
    Fault(
        "a program that does not follow the memory format is asked for it",
        "dtf/engine/assemble.py",
        "    if inputs.task.channels_last is None or program.follows_memory_format:\n",
        "    if True:\n",
        ("tests/laws/test_memory_format_choice.py::test_a_program_that_does_not_follow_is_no_silent_choice",),
    ),
]
