"""Ranks that wait for each other: who waits for whom is said, and ranks that never meet are refused by name.

The limits of hangs are far away in all of these tests: what ends a run here is the proof.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtf.core.errors import Exit
from dtf.core.types import Failed, Note
from dtf.launch import waits
from tests.support.launching import LONG_S, launch

UNEVEN = [
    "plugins=[tests.support.uneven]",
    "recipe=uneven",
    "sampler=sequential",
    "step.batch_size=16",
    "train.steps=4",
    "train.eval_every=0",
    "launcher.devices=cpu",
    "launcher.processes=2",
    f"launcher.hang_timeout_s={LONG_S}",
    f"launcher.start_timeout_s={LONG_S}",
]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "WAIT_S", 1.0)
    monkeypatch.setattr(waits, "LONG_S", 1.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["recipe.late=32"],
        pytest.param(["recipe.late=32", "strategy.prefetch=0"], marks=pytest.mark.slow),
        pytest.param(["recipe.late=32", "strategy.reshard_after_forward=false"], marks=pytest.mark.slow),
    ],
    ids=["in the third step", "gathered one by one", "gathered once"],
)
def test_a_module_that_only_some_rows_use_is_refused_by_name(run_dtf, options: list[str]) -> None:
    done = run_dtf(*UNEVEN, "strategy=fsdp", *options)
    assert done.code == Exit.CONFIG, done.err
    line = done.err.splitlines()[-1]
    print(line)
    assert re.match(r"dtf: error\[E_CONFIG\] rank=[01] step=2: rank ", line)
    assert re.search(r"rank (\d) (has waited for .* in|entered) the .* of .*, which rank \d has not entered", line), (
        line
    )
    assert "They never meet" in line
    assert "The rows of rank 1 do not use third, or not as often as those of others. With strategy=fsdp" in line
    assert "restart" not in done.err and "---- attempt 1" not in (done.folder / "rank_0.log").read_text()
    record = json.loads((done.folder / "run.json").read_text())
    assert record["exit"] == Exit.CONFIG and "do not use third" in record["cause"]


@pytest.mark.slow
def test_ranks_that_wait_in_a_circle_are_refused(tmp_path: Path) -> None:
    done = launch("tests.support.entries:waits_in_a_circle", tmp_path, hang_timeout_s=LONG_S, start_timeout_s=LONG_S)
    assert done.code == Exit.CONFIG
    (failed,) = done.of(Failed)
    assert re.search(r"rank 1 has waited for \d+ s in the blue sum, which rank 0 has not entered", failed.message)
    assert re.search(r"rank 0 has waited for \d+ s in the red sum, which rank 1 has not entered", failed.message)
    assert not any("restart" in note.text for note in done.of(Note))


@pytest.mark.slow
def test_a_long_step_gets_a_line_and_ends(run_dtf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow rows wait until the line is written. A busy machine may have a line about the start first."""
    told, texts = tmp_path / "told", []

    def note(level: str, text: str) -> Note:
        if not text.startswith("the start takes long"):
            texts.append(text)
            told.touch()
        return Note(level, text)

    monkeypatch.setattr(waits, "Note", note)
    done = run_dtf(*UNEVEN, "strategy=fsdp", f"recipe.until={told}")
    assert done.code == Exit.OK, done.err
    print(texts)
    assert len(texts) == 1 and texts[0] in done.err + done.out
    pattern = (
        r"rank 0 has waited for \d+ s in the all-gather of .*, rank 1 has not entered it: it has been in .*forward"
    )
    assert re.match(pattern, texts[0])
