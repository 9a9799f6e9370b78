"""Faults of attention divided by heads."""

from tests.planted.fault import Fault

ZOO = "tests/zoo/test_zoo.py::test_the_same_numbers_or_a_clear_no"

FAULTS = [
    Fault(
        "a fused projection is cut as if it were one part",
        "dtf/strategies/tensor_parallel/slices.py",
        "parts = by.parts or (width,)",
        "parts = (width,)",
        ("tests/laws/test_tensor_heads.py::test_attention_computes_as_if_whole",),
    ),
    Fault(
        "ranks take each other's heads of a mask",
        "dtf/strategies/tensor_parallel/attention.py",
        "mask.unflatten(0, (-1, heads))[:, first:last]",
        "mask.unflatten(0, (-1, heads))[:, : last - first]",
        ("tests/laws/test_tensor_heads.py::test_attention_computes_as_if_whole",),
    ),
    Fault(
        "a norm of each head learns from the heads of its rank alone",
        "dtf/strategies/tensor_parallel/layers.py",
        "fanned = {key: fan(p, self._group, self._name) for",
        "fanned = {key: p.view_as(p) for",
        ("tests/laws/test_tensor_heads.py::test_attention_computes_as_if_whole",),
    ),
    Fault(
        "encoders of torch take their fast path with slices of weights",
        "dtf/strategies/tensor_parallel/divide.py",
        "    leave_fast_paths(model)\n",
        "",
        ("tests/laws/test_tensor_heads.py::test_attention_computes_as_if_whole",),
    ),
    Fault(
        "attention with fewer heads than ranks is refused, though nobody has asked for its split",
        "dtf/strategies/tensor_parallel/families.py",
        "if key not in small}",
        "}",
        ("tests/laws/test_tensor_families.py::test_attention_with_fewer_heads_than_ranks_stays_whole",),
    ),
    Fault(
        "a layout of the last layer alone leaves a ViT whole",
        "dtf/strategies/tensor_parallel/families.py",
        "    if any(by is not Split.classes for by in layout.splits.values()):\n",
        "    if layout.splits:\n",
        ("tests/laws/test_tensor_families.py::test_a_layout_of_the_last_layer_leaves_the_rest_to_be_found",),
    ),
    Fault(
        "positions around whole attention are divided",
        "dtf/strategies/tensor_parallel/families.py",
        "layout.positions if small else whole.positions",
        "whole.positions",
        ("tests/laws/test_tensor_families.py::test_attention_with_fewer_heads_than_ranks_stays_whole",),
    ),
    Fault(
        "a module that fails on slices ends a run with a traceback",
        "dtf/strategies/output_reference.py",
        "            named = author_error(error)\n",
        "            named = None\n",
        (f"{ZOO}[heads_by_count_and_width-tensor-2]",),
    ),
    Fault(
        "stages let a dropout on slices draw its own mask",
        "dtf/strategies/pipeline/trials.py",
        "_refuse_found(drew, learning, asks.found, unlike, self._dims, world)",
        "_refuse_found(drew, learning, asks.found, [], self._dims, world)",
        (f"{ZOO}[dropout_unnamed-mesh pipeline=2 tensor=2-4]",),
    ),
    Fault(
        "modules of TorchScript get hooks that they do not take",
        "dtf/model/seeded_calls.py",
        "            if isinstance(module, torch.jit.ScriptModule):  # calls no",
        "            if False:  # calls no",
        (f"{ZOO}[scripted-ddp-2]",),
    ),
]
