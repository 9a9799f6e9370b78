"""What fsdp gathers is never out of date, in whatever order a model uses its modules, and whichever it leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.config.settings import load_parts
from dtf.core.types import Shard
from tests.support.harness import Case, _Run, difference, reference, spread

load_parts([])
KINDS = ["head_first", "skips"]


def case(kind: str, **more: Any) -> dict[str, Any]:
    recipe = {"name": "passes", "kind": kind}
    return {"plugin": "tests.support.author_passes", "recipe": recipe, "steps": 4, "eval_every": 1, **more}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=f"{kind}-{name}", marks=() if i == j else pytest.mark.slow)
        for i, kind in enumerate(KINDS)
        for j, (name, options) in enumerate(
            {"usual": {}, "kept": {"prefetch": 2, "reshard_after_forward": False}}.items()
        )
    ],
)
def test_training_goes_on_from_the_weights_after_averages_were_evaluated(kind: str, options: dict[str, Any]) -> None:
    averaged = case(kind, ema=0.5)
    assert difference(spread("ddp", 1, **averaged), spread("fsdp", 2, options=options, **averaged)) < 1e-10


def evaluated_first(rank: int, size: int, start: str = "", perturb: int = 0, **values: Any) -> dict[str, Any]:
    """As `harness.train`, with a pass of evaluation before the weights to begin with are there. The engine does so."""
    from dtf.model.perturb import perturb as move

    torch.set_num_threads(1)
    run = _Run(rank, size, Case(**values))
    run.program.trial_eval(run.program.prepare(run._rows("eval", Shard(0, 1), 8).rows(np.arange(8), 0)))
    if start:
        run.case = replace(run.case, start=start)
        run.clock_state, run.open_window = run._load()
    for copy in run.program.replicated() if perturb else ():
        move(copy, perturb)
    run.fit()
    return run.result()


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)])
def test_a_resumed_run_computes_with_the_weights_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    whole = spread("fsdp", 2, **case(kind))
    spread("fsdp", 2, folder=str(tmp_path), save_every=2, halt=True, **case(kind))
    again = spread("fsdp", 2, call=f"{__name__}:evaluated_first", start=str(tmp_path / "step_000002"), **case(kind))
    assert again["tensors"] == whole["tensors"] and again["eval"]["4"] == whole["eval"]["4"]


@pytest.mark.slow
def test_perturbed_weights_are_gathered_anew() -> None:
    spoilt = case("skips", perturb=1, precision="fp32")
    again = spread("fsdp", 2, call=f"{__name__}:evaluated_first", **spoilt)
    assert again["tensors"] == spread("fsdp", 2, **spoilt)["tensors"]


def one_looks(rank: int, size: int, **values: Any) -> dict[str, Any]:
    """As `harness.train`, where code of rank 0 alone asks for the state of the model before each step."""
    torch.set_num_threads(1)
    run = _Run(rank, size, Case(**values))
    program: Any = run.program
    step = program.step

    def looked(ticket: Any, batch: Any) -> Any:
        if not rank:
            program._replica.model.state_dict()
        return step(ticket, batch)

    program.step = looked
    run.fit()
    return run.result()


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"zero": 1}], ids=str)
def test_what_one_rank_drops_after_an_evaluation_is_gathered_by_all(options: dict[str, Any]) -> None:
    """Else the next step waits for ever: one rank gathers what the others still have."""
    looked = spread("fsdp", 2, call=f"{__name__}:one_looks", options=options, eval_every=1)
    assert difference(reference(eval_every=1), looked) <= 1e-10
