"""Laws: exact resume, one checkpoint for every strategy and world size, every sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import difference, spread, variants

STEPS, HALF = 12, 6
PLAN: dict[str, Any] = {"log_every": 4, "eval_every": 3}  # the save falls into an open metric window
PAIRS = [("dp", 1), ("dp", 3), ("ddp", 1), ("ddp", 2), ("ddp", 4)]


def unbroken(folder: Path, **case: Any) -> dict[str, Any]:
    """The whole run on one process. It saves where the other dies: saving averages the running statistics, which may move their last bits."""
    return spread("ddp", 1, steps=STEPS, folder=str(folder / "unbroken"), save_every=HALF, **PLAN, **case)


def broken(folder: Path, first: tuple[str, int], second: tuple[str, int], options: tuple[dict, dict] = ({}, {}), **case: Any) -> dict[str, Any]:
    """A run that dies after its save at half time and goes on elsewhere, as one."""
    a = spread(*first, options=options[0], steps=STEPS, folder=str(folder / "broken"), save_every=HALF, halt=True, **PLAN, **case)
    b = spread(*second, options=options[1], steps=STEPS, start=str(folder / "broken" / f"step_{HALF:06}"), **PLAN, **case)
    assert not a["train"].keys() & b["train"].keys() and not a["ids"].keys() & b["ids"].keys()
    return {key: a[key] | b[key] for key in ("train", "eval", "ids")} | {"tensors": b["tensors"]}


@pytest.mark.parametrize("second", PAIRS, ids=str)
@pytest.mark.parametrize("first", PAIRS, ids=str)
def test_a_checkpoint_goes_on_under_any_strategy_and_world_size(first: tuple[str, int], second: tuple[str, int], tmp_path: Path) -> None:
    whole = broken(tmp_path, first, second)
    assert difference(unbroken(tmp_path), whole) <= 1e-10
    ids = Counter(i for step in whole["ids"].values() for i in step)
    assert len(ids) == 100 and max(ids.values()) - min(ids.values()) <= 1, "12 steps of 24 rows are two epochs and most of a third"
    for epoch in range(2):
        assert sorted(i for step in range(5 * epoch, 5 * epoch + 5) for i in whole["ids"][str(step)]) == list(range(100))


@pytest.mark.parametrize("optimizer", ["adamw", "lars"])
@pytest.mark.parametrize(("strategy", "options"), variants(), ids=str)
def test_optimizer_state_travels(strategy: str, options: dict, optimizer: str, tmp_path: Path) -> None:
    whole = broken(tmp_path, ("ddp", 2), (strategy, 3), ({"shard_optimizer": True}, options), optimizer=optimizer)
    assert difference(unbroken(tmp_path, optimizer=optimizer), whole) <= 1e-10


@pytest.mark.parametrize("precision", ["fp32", "bf16_master", "fp16"])
@pytest.mark.parametrize(("strategy", "processes"), [("dp", 2), ("ddp", 2), ("ddp", 3)])
def test_resume_is_exact(strategy: str, processes: int, precision: str, tmp_path: Path) -> None:
    """Bit for bit the uninterrupted run: parameters, optimizer, loss scale, metrics, masks and data position."""
    whole = spread(strategy, processes, steps=STEPS, folder=str(tmp_path / "unbroken"), save_every=HALF, precision=precision, **PLAN)
    again = broken(tmp_path, (strategy, processes), (strategy, processes), precision=precision)
    assert again == {key: whole[key] for key in again}
