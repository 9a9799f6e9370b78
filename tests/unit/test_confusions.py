"""What was taken for what: counted once, printed and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtf.core.errors import DataError
from dtf.engine.predictions import ConfusionTable, Prediction
from dtf.jobs import evaluate
from dtf.jobs.outcome import Evaluation
from dtf.runs.report import html
from dtf.runs.results import read_runs
from tests.unit.test_report import run_folder

PAIRS = [(0, 0), (0, 0), (0, 2), (1, 1), (2, 0), (2, 0), (2, 0), (2, 2), (2, 1)]
NAMES = ("cat", "<dog>", "hare")


def evaluated(pairs: list[tuple[int, int]], names: tuple[str, ...], width: int) -> dict[str, Any]:
    table = ConfusionTable(names)
    table.add([Prediction(row, float(label), [guess], [0.5], width) for row, (label, guess) in enumerate(pairs)])
    table.add([Prediction(99, None, [0], [0.5], width)])  # of which nobody knows what it is
    about = {"model": "m", "split": "eval", "rows": len(pairs), "unread": 0, "metrics": {"top1": 0.5}}
    about |= {"digest": "", "unread_rows": []}
    return about | {"classes": table.classes(), "confusions": table.confusions()}


def printed(*given: Any) -> str:
    return evaluate._text(Evaluation(**evaluated(*given), folder=Path("run")))


def test_pairs_say_what_recall_and_precision_say() -> None:
    found = evaluated(PAIRS, NAMES, 3)
    assert found["confusions"] == [[2, 0, 3], [0, 2, 1], [2, 1, 1]]
    assert [(row["rows"], row["predicted"]) for row in found["classes"]] == [(3, 5), (1, 2), (5, 2)]
    assert [row["recall"] for row in found["classes"]] == pytest.approx([2 / 3, 1.0, 1 / 5])


def test_few_classes_are_a_matrix() -> None:
    lines = printed(PAIRS, NAMES, 3).splitlines()
    start = lines.index("rows of each class, by what they were taken for:")
    cells = [line.split() for line in lines[start + 1 :]]
    assert cells == [
        ["0", "1", "2"],
        ["cat", "0", "2", ".", "1"],
        ["<dog>", "1", ".", "1", "."],
        ["hare", "2", "3", "1", "1"],
    ]
    assert len({len(line) for line in lines[start + 1 :]}) == 1, "columns stand below each other"


def test_many_classes_are_their_most_frequent_mistakes() -> None:
    pairs = [(number, (number + 1) % 50) for number in range(50)] + [(7, 9)] * 3
    lines = printed(pairs, (), 50).splitlines()
    start = lines.index("the most frequent of 51 pairs that were confused:")
    assert lines[start + 1].split() == ["3", "7", "taken", "for", "9"] and len(lines) == start + 1 + evaluate.PAIRS


def test_nothing_is_said_where_nothing_was_confused_or_there_are_no_classes() -> None:
    assert printed([(0, 0), (1, 1)], NAMES, 3).endswith("no row was taken for another class")
    event = ConfusionTable(())
    event.add([Prediction(0, 1.0, [], [0.2], 0)])
    assert event.classes() == [] == event.confusions()


def test_a_report_draws_the_matrix_of_an_evaluation(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "e")
    assert "taken for" not in html(read_runs([str(folder)]), [], "now")
    (folder / "evaluation.json").write_text(json.dumps(evaluated(PAIRS, NAMES, 3)))
    (result,) = read_runs([str(folder)])
    assert result.confusion == [("cat", [2, 0, 1]), ("<dog>", [0, 1, 0]), ("hare", [3, 1, 1])]
    page = html([result], [], "now")
    assert "What was taken for what" in page and "<th>1 &lt;dog&gt;</th>" in page
    older = evaluated(PAIRS, NAMES, 3)
    del older["confusions"]
    (folder / "evaluation.json").write_text(json.dumps(older))
    assert read_runs([str(folder)])[0].confusion == []
    (folder / "evaluation.json").write_text('{"classes": [{"rows": 1}], "confusions": [[0, 1, 1]]}')
    with pytest.raises(DataError, match="evaluation.json cannot be read"):
        read_runs([str(folder)])
