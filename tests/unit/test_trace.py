"""What a trace says of a step: shares that add up, communication only where nothing is computed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.observers.trace_shares import WORK, shares


def event(name: str, start: float, end: float, category: str = "user_annotation", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, **more}


def op(start: float, end: float) -> dict[str, Any]:
    return event("aten::mm", start, end, "cpu_op")


STEP = event("ProfilerStep#3", 0, 100)


def parts(*events: dict[str, Any]) -> dict[str, float]:
    found = shares([STEP, *events])
    assert found is not None
    return {name: round(100 * share, 6) for name, share in found.parts.items() if share}


def test_sections_on_a_cpu_and_what_no_section_names():
    assert parts(
        event("dtf:forward", 0, 30),
        event("dtf:backward", 30, 80),
        event("dtf:optimizer", 80, 90),
        event("dtf:data", 90, 95),
    ) == {
        "data": 5,
        "forward": 30,
        "backward": 50,
        "optimizer": 10,
        "other": 5,
    }


def test_a_message_counts_only_while_nothing_is_computed():
    events = [event("dtf:backward", 0, 80), op(0, 60), event("gloo:all_reduce", 40, 70)]
    assert parts(*events) == {"backward": 70, "communication": 10, "other": 20}
    found = shares([STEP, *events])
    assert found is not None and found.hidden == pytest.approx(0.2)


def test_replicas_in_threads_divide_a_moment():
    assert parts(event("dtf:forward", 0, 60), event("dtf:backward", 40, 100)) == {"forward": 50, "backward": 50}


def test_evaluating_and_saving_are_no_part_of_a_step():
    found = shares([STEP, event("dtf:forward", 0, 50), event("dtf:evaluate", 50, 90)])
    assert found is not None and found.parts["forward"] == pytest.approx(5 / 6) and found.step_s == pytest.approx(60e-6)


def test_kernels_count_for_the_section_that_launched_them():
    """The host is ahead: what it does says nothing of the device, but where the device waits for it."""
    launch = [
        event("cudaLaunchKernel", at, at + 1, "cuda_runtime", args={"correlation": number})
        for number, at in ((1, 2), (2, 12), (3, 22))
    ]
    host = [
        event("dtf:forward", 0, 10),
        event("dtf:backward", 10, 20),
        event("dtf:optimizer", 20, 30),
        event("dtf:data", 30, 95),
    ]
    kernels = [
        event("gemm", 5, 25, "kernel", args={"correlation": 1}),
        event("gemm", 25, 65, "kernel", args={"correlation": 2}),
        event("ncclDevKernel_AllReduce", 55, 75, "kernel", args={}),
        event("adam", 75, 80, "kernel", args={"correlation": 3}),
    ]
    assert parts(*launch, *host, *kernels) == {
        "data": 15,
        "forward": 25,
        "backward": 40,
        "communication": 10,
        "optimizer": 5,
        "other": 5,
    }


def test_no_step_no_shares():
    assert shares([op(0, 10), {"ph": "M", "name": "process_name"}]) is None


SPANS = st.tuples(
    st.floats(-20, 120), st.floats(0, 50), st.sampled_from([*(f"dtf:{name}" for name in WORK), "gloo:send", "aten::mm"])
)


@given(st.lists(SPANS, max_size=20))
def test_shares_are_parts_of_one_whole(spans):
    found = shares([STEP, *(event(name, start, start + length) for start, length, name in spans)])
    assert found is not None
    assert (
        sum(found.parts.values()) == pytest.approx(1)
        and min(found.parts.values()) >= 0
        and -1e-9 <= found.hidden <= 1 + 1e-9
    )
    assert found.step_s == pytest.approx(100e-6)
