"""Ranks of a host that has too little memory build the model one after another, and start from the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtf.core.errors import Exit
from dtf.core.types import Note
from dtf.launch import waits
from tests.launch.test_train import tensors

RUN = [
    "plugins=[tests.support.little_memory]",
    "recipe=told",
    "step.batch_size=16",
    "train.steps=2",
    "train.eval_every=0",
    "launcher.devices=cpu",
    "observer=[]",
]


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path / "built"


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [("fsdp", 3), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("ddp", "pipeline", "tensor"))],
    ids=str,
)
@pytest.mark.slow
def test_one_after_another(run_dtf, told: Path, strategy: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*RUN, f"strategy={strategy}", f"launcher.processes={processes}"]
    options += ["strategy.balance=flops"] * (strategy == "pipeline")  # times would cut elsewhere each time
    monkeypatch.setenv("LEFT", "8000")  # more than one model takes, less than two
    done = run_dtf(*options)
    assert done.code == Exit.OK, done.err
    lines = [line.split() for line in told.read_text().splitlines()]
    turns = lines[-2 * processes :]  # before them come those that were given up
    assert [what for what, _ in turns] == ["begin", "end"] * processes
    assert [process for _, process in turns[::2]] == [process for _, process in turns[1::2]]
    assert len({process for _, process in turns}) == processes
    assert len(lines) - len(turns) == processes and all(what == "begin" for what, _ in lines[:processes])
    row = json.loads((done.folder / "run.json").read_text())["table"]["start"]
    assert row.startswith(f"ranks build the model one after another, as {processes} do not fit into the 8.0 kB that")
    assert "of the whole model + " in row
    told.unlink()
    monkeypatch.setenv("LEFT", str(1 << 40))
    free = run_dtf(*options)
    assert free.code == Exit.OK, free.err
    assert "start" not in json.loads((free.folder / "run.json").read_text())["table"]
    assert len(told.read_text().splitlines()) == 2 * processes
    expected = tensors(free.folder, 2)
    assert expected and tensors(done.folder, 2) == expected


@pytest.mark.slow
def test_weights_that_were_given_are_shared_too(run_dtf, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*RUN, "strategy=fsdp", "launcher.processes=2"]
    monkeypatch.setenv("LEFT", str(1 << 40))
    first = run_dtf(*options)
    given = [*options, "seed=1", f"recipe.model.weights={first.folder}"]
    free = run_dtf(*given)
    monkeypatch.setenv("LEFT", "8000")
    done = run_dtf(*given)
    assert free.code == done.code == Exit.OK, free.err + done.err
    assert "start" in json.loads((done.folder / "run.json").read_text())["table"]
    assert tensors(done.folder, 2) == tensors(free.folder, 2)


@pytest.mark.slow
def test_who_waits_for_whom(run_dtf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose turn it is waits until the line is written."""
    said, texts = tmp_path / "said", []

    def note(level: str, text: str) -> Note:
        texts.append(text)
        said.touch()
        return Note(level, text)

    monkeypatch.setattr(waits, "WAIT_S", 1.0)
    monkeypatch.setattr(waits, "Note", note)
    monkeypatch.setenv("LEFT", "8000")
    monkeypatch.setenv("UNTIL", str(said))
    done = run_dtf(*RUN, "observer=[console]", "strategy=fsdp", "launcher.processes=2")
    assert done.code == Exit.OK, done.err
    pattern = r"rank 0 has waited for \d+ s in its turn to build the model, after rank 1, rank 1 has not entered it: "
    assert re.match(pattern, texts[0]) and texts[0] in done.err + done.out
