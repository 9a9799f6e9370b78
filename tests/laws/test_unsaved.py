"""What a model keeps from pass to pass and no checkpoint holds is said before the first save, once, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtf.config.compose import compose
from dtf.core.types import Event, Failed, Note, Place, Saved
from dtf.engine.train import work


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
    ("kind", "name"), [("tensor", "0.kept"), ("buffer", "0.kept"), ("late", "0.kept"), ("extra", "0.seen")]
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
