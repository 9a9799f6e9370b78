"""Numbers that are rounded on their way between trainers and servers, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtf.api.options import StepOptions
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.pserver.net.codec import Array, Schema, decode, encode
from dtf.pserver.net.compression import WIRE_DTYPES, compress, decompress, rounded
from dtf.pserver.options import Mode, Wire
from dtf.pserver.param_slices import lay_out, views, wire_layout
from dtf.pserver.strategy import Pserver
from tests.laws.test_sharded_tables import ANY
from tests.support.harness import PRECISIONS, difference, spread
from tests.support.toy import Toy

FINITE = arrays.arrays(
    np.float32, st.tuples(st.integers(0, 5), st.integers(1, 4)), elements=st.floats(-60000, 60000, width=32)
)


@given(FINITE, st.sampled_from(list(WIRE_DTYPES)))
def test_what_arrives_is_torch_s_rounding(array: np.ndarray, wire: str) -> None:
    schema = Schema({}, {"rows": Array(2, ("f32", "f16", "bf16"))})
    message = decode(schema, encode(schema, {}, {"rows": compress(array, WIRE_DTYPES[wire])}))
    arrived = decompress(message.arrays["rows"], message.dtypes["rows"])
    dtype = WIRE_DTYPES[wire] or torch.float32
    assert np.array_equal(arrived, torch.from_numpy(array).to(dtype).float().numpy())
    assert np.array_equal(arrived, rounded(array, WIRE_DTYPES[wire]))


def test_blocks_take_half_the_bytes() -> None:
    model = Toy().build_model()
    layout = lay_out(model, PRECISIONS["fp32"], 1, True, 8192, "round_robin")[0]
    half = wire_layout(layout, torch.bfloat16)
    assert layout.bytes / 2 <= half.bytes < layout.bytes and len(half.learning) == len(layout.learning)
    memory = torch.zeros(half.bytes, dtype=torch.uint8)
    assert {view.dtype for view in views(memory, half.learning)} == {torch.bfloat16}
    assert wire_layout(layout, None) is layout


@pytest.mark.parametrize("recipe", [{}, ANY | {"rows": 100, "scale": 2**54 + 1}], ids=["toy", "tabled"])
def test_a_run_with_narrow_messages_is_near_the_exact_one_and_not_the_same(recipe: dict[str, Any]) -> None:
    synchronous, narrowed = (
        spread("pserver", 2, precision="fp32", options={"wire": wire}, recipe=recipe) for wire in ("same", "bf16")
    )
    assert 1e-6 < difference(synchronous, narrowed) < 0.5


@pytest.mark.parametrize(("options", "precision"), [({"mode": Mode.geo}, "fp32"), ({}, "fp64")])
def test_what_is_no_gradient_of_fp32_is_not_narrowed(options: dict, precision: str) -> None:
    from dtf.optim.optimizers import Sgd

    task = Task(Toy(), Sgd(), PRECISIONS[precision], StepOptions(), 0)
    with pytest.raises(ConfigError, match=r"strategy\.wire=bf16"):
        Pserver(wire=Wire.bf16, **options).check(task, 2, "cpu")
