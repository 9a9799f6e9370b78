"""Faults of attention divided by heads."""

from tests.planted.fault import Fault

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
]
