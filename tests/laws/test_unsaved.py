"""What a model keeps from pass to pass and no checkpoint holds is said before the first save, once, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.config.compose import compose
from dtf.core.types import Event, Failed, Note, Place, Saved
from dtf.engine.train import work
from tests.support import harness
from tests.support.arrays import seldom
from tests.support.ranks import ranks


def events(folder: Path, kind: str, until: int = 4, strategy: str = "ddp", soft: bool = False) -> list[Event]:
    """Of four steps in this process, each of which is saved."""
    options = ["launcher=inline", "launcher.devices=cpu", "observer=[]", "train.steps=4", "seed=1"]
    options.append(f"strategy={strategy}")
    saves = ["checkpoint=every", "checkpoint.every_steps=1", f"train.until={until}", "train.epochs=null"]
    plugin = ["plugins=[tests.support.keeping_model]", "recipe=keeping", f"recipe.kind={kind}", "step.batch_size=16"]
    plugin.append(f"recipe.soft={soft}")
    plugin.append("recipe.batch_norm=false")  # which cancels what is added to its inputs
    seen: list[Event] = []
    config = compose([*plugin, *options, *saves]).config
    work(config, str(folder), "run", Place(prefix="run/0"), seen.append)
    assert not any(isinstance(event, Failed) for event in seen), seen[-1]
    return seen


def warnings(seen: list[Event]) -> list[str]:
    return [event.text for event in seen if isinstance(event, Note) and event.level == "warning"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("tensor", "0.kept"), ("buffer", "0.kept"), ("late", "0.kept"), ("extra", "0.seen"), ("loss", "recipe.level")],
)
def test_what_is_kept_is_named_once(kind: str, name: str, tmp_path: Path) -> None:
    seen = events(tmp_path, kind)
    (text,) = warnings(seen)
    assert name in text and "Layout.buffers" in text
    assert seen.index(Note("warning", text)) < next(i for i, event in enumerate(seen) if isinstance(event, Saved))


@pytest.mark.parametrize("kind", ["none", "looked_at", "saved"])
def test_what_changes_no_number_or_is_saved_is_not(kind: str, tmp_path: Path) -> None:
    assert not warnings(events(tmp_path, kind))


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "pipeline"])
def test_on_one_process_under_any_strategy(strategy: str, tmp_path: Path) -> None:
    assert len(warnings(events(tmp_path, "tensor", strategy=strategy))) == 1


def test_evaluations_take_rows_of_the_evaluation(tmp_path: Path) -> None:
    """Those of the training may have another form."""
    assert len(warnings(events(tmp_path, "tensor", soft=True))) == 1


def test_a_run_that_goes_on_is_warned_too(tmp_path: Path) -> None:
    events(tmp_path, "tensor", until=2)
    assert len(warnings(events(tmp_path, "tensor"))) == 1


def warned(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """A run on this rank, what it says before a save, and its tensors before and after that."""
    run = harness._Run(rank, size, harness.Case(**case))
    run.fit()
    before = [parameter.clone() for copy in run.program.replicated() for parameter in copy.values()]
    texts = [run.program.check_replicas() for _ in range(2)]
    after = [parameter for copy in run.program.replicated() for parameter in copy.values()]
    return run.result() | {"texts": texts, "left": all(map(torch.equal, before, after))}


@pytest.mark.parametrize(("strategy", "degree"), [("pipeline", 2), pytest.param("tensor", 2, marks=pytest.mark.slow)])
def test_ranks_that_divide_one_model_say_it_once(strategy: str, degree: int) -> None:
    recipe = {"name": "keeping", "kind": "tensor", "batch_norm": False}
    case: dict[str, Any] = {"plugin": "tests.support.keeping_model", "recipe": recipe, "options": {"degree": degree}}
    first, second = ranks(2, "tests.laws.test_unsaved:warned", strategy=strategy, shared=True, slots=2, **case)
    assert first["texts"] == second["texts"] and first["left"] and second["left"]
    text, again = first["texts"]
    assert "0.kept" in text and again is None


@pytest.mark.parametrize(
    ("strategy", "options", "kind"),
    seldom(
        [
            (strategy, {"servers": 1} if strategy == "pserver" else {}, kind)
            for strategy in ("dp", "ddp", "fsdp", "pserver")
            for kind in ("loss", "loss_counts")
        ],
        lambda strategy, options, kind: kind == "loss" or strategy == "ddp",
    ),
)
def test_a_loss_that_keeps_what_numbers_depend_on_is_refused_where_rows_are_divided(
    strategy: str, options: dict[str, Any], kind: str
) -> None:
    case = {"plugin": "tests.support.keeping_model", "recipe": {"name": "keeping", "kind": kind, "batch_norm": False}}
    name = "level" if kind == "loss" else "losses"
    with pytest.raises(AssertionError, match=f"other numbers for the same rows after .*recipe.{name}"):
        harness.spread(strategy, 2, options=options, **case)


def test_trial_passes_leave_a_recipe_as_it_was() -> None:
    case = {"plugin": "tests.support.keeping_model", "recipe": {"name": "keeping", "kind": "loss_counts"}}
    (run,) = ranks(1, "tests.laws.test_unsaved:losses", shared=True, slots=1, **case)
    assert run["losses"] == 0


def losses(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """How often the recipe's loss was called before the first step."""
    run = harness._Run(rank, size, harness.Case(**case))
    run.program.check_replicas()
    return {"losses": run.toy.losses}  # type: ignore[attr-defined]
