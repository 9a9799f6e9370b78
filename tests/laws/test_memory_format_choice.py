"""`step.memory_format=auto` changes no number and breaks no model, whatever that draws or reads in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dtf.config.compose import compose
from dtf.core.errors import Exit
from dtf.core.types import Event, Failed, Measured, Place, Started
from dtf.engine.train import work
from tests.support.harness import variants
from tests.support.placed_model import WHY

VIEWS = [kind for kind, why in WHY.items() if "view" in why]
CASE = ["plugins=[tests.support.placed]", "recipe=placed", "step.batch_size=8", "step.micro_batch_rows=4"]
CASE += ["precision=fp32", "optimizer=sgd", "lr.peak=0.01", "launcher.devices=cpu", "checkpoint=off"]
CASE += ["train.steps=3", "train.log_every=1", "train.eval_every=0"]


@pytest.mark.parametrize("kind", WHY)
def test_what_auto_chooses_changes_no_number(kind: str, tmp_path: Path) -> None:
    auto, first = (_train(tmp_path / value, kind, value) for value in ("auto", "contiguous"))
    assert len(first.numbers) == 3 and auto.numbers == first.numbers
    assert auto.chosen.startswith(f"contiguous: {WHY[kind]}" if WHY[kind] else "channels last")
    assert first.chosen == "contiguous"  # what was asked for is told, too


@pytest.mark.parametrize("kind", VIEWS)
def test_who_asks_for_what_a_model_does_not_bear_is_told_the_way_out(kind: str, tmp_path: Path) -> None:
    (failed,) = (event for event in _train(tmp_path, kind, "channels_last").events if isinstance(event, Failed))
    assert (failed.exit, failed.step) == (Exit.CONFIG, 0)
    assert "view size is not compatible" in failed.message and "step.memory_format=contiguous" in failed.message


def test_a_program_that_does_not_follow_is_no_silent_choice(tmp_path: Path) -> None:
    auto, *asked = (
        _train(tmp_path / value, "drawn_modules", value, "own_passes")
        for value in ("auto", "channels_last", "contiguous")
    )
    assert len(auto.numbers) == 3 and auto.chosen.startswith("that of Spmd, which does not say that it follows")
    for run in asked:
        (failed,) = (event for event in run.events if isinstance(event, Failed))
        assert failed.exit == Exit.CONFIG and failed.message.endswith("or use step.memory_format=auto")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name, options in variants() if not options])
def test_ranks_of_each_strategy_choose_alike(strategy: str, run_dtf: Callable[..., Any]) -> None:
    """Strategies that cut a model refuse one that draws or differentiates by itself."""
    case = [*CASE, f"strategy={strategy}", "launcher.processes=2", "step.micro_batch_rows=0"]
    for kind in ("drawn_modules", "dropout", "viewed_backward"):
        found = []
        for value in ("auto", "contiguous"):
            run = run_dtf(*case, f"recipe.kind={kind}", f"step.memory_format={value}")
            if run.code == Exit.CONFIG and strategy in ("pipeline", "tensor") and kind != "drawn_modules":
                assert "view size" not in run.err
                continue
            assert run.code == 0, run.err
            lines = (run.folder / "metrics.jsonl").read_text().splitlines()
            found.append([_approximate(json.loads(line)) for line in lines])
            chosen = 'memory_format="contiguous: ' if WHY[kind] else 'memory_format="channels last"'
            assert (chosen in run.out) is (value == "auto")
        assert not found or found[0] == found[1]


class _Run(NamedTuple):
    events: list[Event]
    numbers: list[dict[str, Any]]
    """Of each step."""

    chosen: str
    """What the start-up table says of the memory format."""


@cache
def _config(strategy: str) -> dict[str, Any]:
    return compose([*CASE, "launcher=inline", "observer=[]", f"strategy={strategy}"]).config


def _train(folder: Path, kind: str, memory_format: str, strategy: str = "ddp") -> _Run:
    events: list[Event] = []
    folder.mkdir(exist_ok=True)
    config = copy.deepcopy(_config(strategy))
    config["recipe"]["kind"], config["step"]["memory_format"] = kind, memory_format
    work(config, str(folder), "run", Place(prefix="run/0"), events.append)
    table = next((event.table for event in events if isinstance(event, Started)), {})
    numbers = [_approximate(event.values) for event in events if isinstance(event, Measured)]
    return _Run(events, numbers, table.get("memory format", ""))


def _approximate(values: dict[str, Any]) -> dict[str, Any]:
    return {name: pytest.approx(values[name], rel=2e-5) for name in ("loss", "grad_norm")}
