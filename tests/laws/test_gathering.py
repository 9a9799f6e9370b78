"""What fsdp gathers is never out of date, in whatever order a model uses its modules, and whichever it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtf.config.settings import load_parts
from tests.support.harness import difference, spread

load_parts([])
KINDS = ["head_first", "skips"]


def case(kind: str, **more: Any) -> dict[str, Any]:
    recipe = {"name": "passes", "kind": kind}
    return {"plugin": "tests.support.author_passes", "recipe": recipe, "steps": 4, "eval_every": 1, **more}


@pytest.mark.parametrize("options", [{}, {"prefetch": 2, "reshard_after_forward": False}], ids=["usual", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_the_weights_after_averages_were_evaluated(kind: str, options: dict[str, Any]) -> None:
    averaged = case(kind, ema=0.5)
    assert difference(spread("ddp", 1, **averaged), spread("fsdp", 2, options=options, **averaged)) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_computes_with_the_weights_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    whole = spread("fsdp", 2, **case(kind))
    spread("fsdp", 2, folder=str(tmp_path), save_every=2, halt=True, **case(kind))
    saved = tmp_path / "step_000002"
    again = spread("fsdp", 2, start=str(saved), **case(kind))
    assert again["tensors"] == whole["tensors"] and again["eval"]["4"] == whole["eval"]["4"]
