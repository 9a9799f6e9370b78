"""The pictures of the documentation come from runs, through the code that draws on a terminal."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs import pictures
from dtf.core.types import Ended, Event, Saved, Started
from dtf.observers.events import Events
from dtf.observers.jsonl import Jsonl
from tests.unit.test_observers import evaluation, train, watch

CONFIG = "recipe: {name: shapes}\nstrategy: {name: ddp}\nprecision: {name: bf16}\nlr: {peak: 0.1}\n"


def recorded(run: Path, evaluations: int = 3) -> Path:
    """A run folder as observers leave it."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    events: list[Event] = [Started(0, 480, 120, {"recipe": "shapes: 75,160 parameters", "run folder": str(run)})]
    for number in range(1, evaluations + 1):
        step = 20 * number
        events += [
            train(step),
            replace(evaluation(step, best=True), step=step),
            Saved(step, str(run / f"checkpoints/step_{step:06d}"), True, 0.31),
        ]
    events.append(Ended(480, "finished", {"loss": 0.25, "top1": 0.95, "best_top1": 0.96, "best_step": 440.0}))
    for observer in (Events(), Jsonl()):
        watch(observer, events, run)
    return run


def words(picture: Path) -> str:
    """What is written in an SVG: one line of the terminal a line, each piece at its column (a character is 12.2
    wide).
    """
    rows: dict[float, str] = {}
    for x, y, text in re.findall(
        r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', picture.read_text(encoding="utf-8")
    ):
        rows[float(y)] = rows.get(float(y), "").ljust(round(float(x) / 12.2)) + html.unescape(text).replace("\xa0", " ")
    return "\n".join(text for _, text in sorted(rows.items()))


def test_a_terminal_shows_table_lines_and_summary_without_a_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / "terminal.svg"
    assert pictures.main(["terminal", str(out), str(recorded(tmp_path / "outputs/shapes/one"))]) == 0
    text = words(out)
    for word in (
        "python -m dtf",
        "dtf · shapes · ddp · bf16",
        "shapes: 75,160 parameters",
        "eval  step  20",
        "save  checkpoints/step_000020  0.31 s",
    ):
        assert word in text, word
    for word in ("480/480", "finished after 480 steps", "best 0.9600 at step 440", "throughput", "outputs/shapes/one"):
        assert word in text, word
    assert text.splitlines()[-1].startswith("╰")
    source = out.read_text(encoding="utf-8")
    assert str(tmp_path) not in source and "url(http" not in source and 'url("http' not in source
    assert len(set(re.findall(r"fill: #\w+", source))) > 3  # colours, whatever NO_COLOR says


def test_the_middle_of_a_long_run_is_one_line(tmp_path):
    pictures.terminal(
        out := tmp_path / "terminal.svg", recorded(tmp_path / "outputs/shapes/one", evaluations=20), "long"
    )
    text = words(out)
    assert re.findall(r"eval  step +(\d+)", text) == ["20", "40", "60", "380", "400"]
    assert re.findall(r"step_0*(\d+)", text) == ["20", "40", "60", "380", "400"]
    assert text.count("⋮") == 1


def test_a_run_that_was_not_recorded_says_how_to_record_one(tmp_path, capsys):
    run = recorded(tmp_path / "run")
    (run / "events.jsonl").unlink()
    assert pictures.main(["terminal", str(tmp_path / "a.svg"), str(run)]) == 65
    assert "observer=[console,jsonl,tensorboard,events]" in capsys.readouterr().err


def test_curves_are_a_small_png_of_fixed_width(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    runs = [recorded(tmp_path / name) for name in ("a", "b")]
    assert pictures.main(["curve", str(tmp_path / "curve.png"), *map(str, runs)]) == 0
    picture = Image.open(tmp_path / "curve.png")
    assert picture.format == "PNG" and picture.width == 1800
    assert (tmp_path / "curve.png").stat().st_size < 80_000


def test_runs_are_named_by_what_differs(tmp_path):
    runs = [recorded(tmp_path / name) for name in ("a", "b")]
    (runs[1] / "config.yaml").write_text(CONFIG.replace("0.1", "0.2"))
    assert pictures._names(runs) == ["lr.peak=0.1 ", "lr.peak=0.2 "]
    assert pictures._names(runs[:1]) == [""]
