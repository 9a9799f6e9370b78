"""Channels last in memory change no number, no checkpoint, and no name, under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import difference, reference, spread, variants

OF_SHAPES: dict[str, Any] = {"recipe": {"name": "shapes_toy"}, "steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [pytest.param(*way, marks=() if way[0] == "fsdp" else pytest.mark.slow) for way in variants() if not way[1]],
)
def test_the_numbers_are_those_of_channels_first(strategy: str, options: dict[str, Any]) -> None:
    found = spread(strategy, 2, options=options, channels_last=True, **OF_SHAPES)
    assert difference(reference(**OF_SHAPES), found) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("last", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_goes_on_in_the_other_format(last: bool, tmp_path: Path) -> None:
    half = {**OF_SHAPES, "optimizer": "adamw", "folder": str(tmp_path), "save_every": 2, "halt": True}
    spread("ddp", 2, channels_last=last, **half)
    found = spread(
        "ddp", 2, channels_last=not last, start=str(tmp_path / "step_000002"), optimizer="adamw", **OF_SHAPES
    )
    whole = reference(optimizer="adamw", **OF_SHAPES)
    later = {split: {step: whole[split][step] for step in found[split]} for split in ("train", "eval")}
    assert difference(whole | later | {"ids": found["ids"]}, found) < 1e-10
