"""Laws: exact resume, one checkpoint for every strategy and world size, every sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.arrays import crossed
from tests.support.harness import ROWS, difference, spread, variants

STEPS, HALF = 8, 4
PLAN: dict[str, Any] = {"log_every": 3, "eval_every": 3}  # the save falls into an open metric window
WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp": ("dp", 3, {}),
    "ddp": ("ddp", 2, {}),
    "zero1": ("ddp", 3, {"shard_optimizer": True}),
    "fsdp": ("fsdp", 3, {}),
    "hybrid": ("fsdp", 4, {"replicate": 2}),
    "tensor": ("tensor", 3, {}),
    "tensor x dp": ("tensor", 4, {"degree": 2}),
    "pipeline": ("pipeline", 3, {}),
    "pipeline x dp": ("pipeline", 4, {"degree": 2, "virtual": 2}),
    "server": ("pserver", 2, {}),
    "two servers": ("pserver", 3, {"servers": 2, "min_block": 1}),
    "three servers": ("pserver", 1, {"servers": 3, "min_block": 1}),
    "one process": ("ddp", 1, {}),
}
"""Every way to spread a run: strategy, processes, options."""


SELDOM = [
    ("dp", "hybrid"),
    ("tensor x dp", "two servers"),
    ("pipeline x dp", "one process"),
    ("ddp", "tensor"),
    ("hybrid", "pipeline x dp"),
    ("two servers", "ddp"),
]


def pairs() -> list[Any]:
    """All pairs; by default those four places of the circle apart, without some that are much like another."""
    names = list(WAYS)
    found = []
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            usual = (j - i) % len(names) == 4 and (first, second) not in SELDOM
            found.append(pytest.param(first, second, marks=() if usual else pytest.mark.slow))
    return found


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Any], Path]]:
    """`spread` with a folder to save in, kept for the tests of this file: result and folder."""

    @cache
    def run(strategy: str, processes: int, case: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("run")
        arguments = {key: dict(value) if key == "options" else value for key, value in case}
        return spread(
            strategy, processes, steps=STEPS, folder=str(folder), save_every=HALF, **(PLAN | arguments)
        ), folder

    def call(strategy: str, processes: int, **case: Any) -> tuple[dict[str, Any], Path]:
        frozen = {key: tuple(sorted(value.items())) if key == "options" else value for key, value in case.items()}
        return run(strategy, processes, tuple(sorted(frozen.items())))

    return call


def unbroken(once: Callable[..., Any], strategy: str = "ddp", processes: int = 1, **case: Any) -> dict[str, Any]:
    """The whole run, which also saves where the other dies."""
    return once(strategy, processes, **case)[0]


def broken(
    once: Callable[..., Any],
    first: tuple[str, int],
    second: tuple[str, int],
    options: tuple[dict, dict] = ({}, {}),
    **case: Any,
) -> dict[str, Any]:
    """A run that dies after its save at half time and goes on elsewhere, as one."""
    a, folder = once(*first, options=options[0], halt=True, **case)
    b = spread(*second, options=options[1], steps=STEPS, start=str(folder / f"step_{HALF:06}"), **(PLAN | case))
    assert not a["train"].keys() & b["train"].keys() and not a["ids"].keys() & b["ids"].keys()
    return b | {key: a[key] | b[key] for key in ("train", "eval", "ids")}


@pytest.mark.parametrize(("first", "second"), pairs())
def test_a_checkpoint_goes_on_under_any_strategy_and_world_size(
    first: str, second: str, once: Callable[..., Any]
) -> None:
    """The next four losses, gradient norms and evaluations, and every tensor at the end, are those of the unbroken
    run.
    """
    (one, processes, options), (other, more, others) = WAYS[first], WAYS[second]
    whole = broken(once, (one, processes), (other, more), (options, others), log_every=1)
    assert difference(unbroken(once, log_every=1), whole) <= 1e-10
    assert [step for step in whole["train"] if int(step) > HALF] == [str(step) for step in range(HALF + 1, STEPS + 1)]
    ids = Counter(i for step in whole["ids"].values() for i in step)
    assert len(ids) == ROWS and max(ids.values()) - min(ids.values()) <= 1, "8 steps are two epochs and most of a third"
    for epoch in range(2):
        assert sorted(i for step in range(3 * epoch, 3 * epoch + 3) for i in whole["ids"][str(step)]) == list(
            range(ROWS)
        )


@pytest.mark.parametrize(
    ("strategy", "options", "optimizer"),
    crossed(variants(), ["adamw", "lars"], usual=["adamw"], turns=["lars", None, None, None, None], programs=True),
)
def test_optimizer_state_travels(strategy: str, options: dict, optimizer: str, once: Callable[..., Any]) -> None:
    whole = broken(once, ("ddp", 2), (strategy, 3), ({"shard_optimizer": True}, options), optimizer=optimizer)
    assert difference(unbroken(once, optimizer=optimizer), whole) <= 1e-10


@pytest.mark.parametrize(("strategy", "processes"), [("dp", 2), ("ddp", 3), ("pserver", 3)])
def test_saving_and_evaluating_leave_no_trace(strategy: str, processes: int) -> None:
    """Batch statistics too: what a rank has averaged itself goes on, the mean over ranks only stands in for it."""
    calm, busy = (
        spread(strategy, processes, precision="fp32", steps=STEPS, log_every=3, eval_every=every)
        for every in (STEPS, 1)
    )
    assert calm["train"] == busy["train"] and calm["tensors"] == busy["tensors"]
    assert calm["eval"][str(STEPS)] == busy["eval"][str(STEPS)]


@pytest.mark.parametrize(
    "precision",
    [pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16_master", marks=pytest.mark.slow), "fp16"],
)
@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        pytest.param("dp", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        ("fsdp", 2),
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
        pytest.param("tensor", 2, marks=pytest.mark.slow),
        ("pipeline", 2),
        ("pserver", 3),
    ],
)
def test_resume_is_exact(strategy: str, processes: int, precision: str, once: Callable[..., Any]) -> None:
    """Bit for bit the uninterrupted run: parameters, optimizer, loss scale, metrics, masks and data position."""
    whole, folder = once(strategy, processes, precision=precision)
    start = str(folder / f"step_{HALF:06}")
    again = spread(strategy, processes, steps=STEPS, start=start, precision=precision, **PLAN)
    assert again["tensors"] == whole["tensors"] and len(again["ids"]) == STEPS - HALF
    for key in ("train", "eval", "ids"):
        assert again[key] == {step: value for step, value in whole[key].items() if step in again[key]}
    assert again["train"].keys() == {"6", "8"} and again["eval"].keys() == {"6", "8"}
