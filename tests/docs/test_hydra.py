"""Each line of the tables in docs/hydra.md does what its second column says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dtf.cli.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hydra.md"
ROWS = re.findall(r"^\| `([^`]+)` \| (.*?)`([^`]+)` \| ", PAGE.read_text(), flags=re.MULTILINE)

FILES = {
    "recipe/tiny.yaml": "# @package _global_\ndefaults: [schema/resnet_shapes@recipe, _self_]\n"
    "step: {batch_size: 17}\n",
    "root.yaml": "defaults: [config, _self_]\nstep: {batch_size: 18}\n",
}


def test_all_rows_are_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(lines) >= 40


@pytest.mark.parametrize(("line", "outcome", "said"), ROWS, ids=[row[0] for row in ROWS])
def test_a_habit(
    line: str,
    outcome: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtf.cli.main.will_launch", lambda argv: False)  # no fork server for what ends here
    for name, text in FILES.items():
        file = tmp_path / "my" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    words = shlex.split(line)
    while words[0] != "dtf":
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    works = outcome.startswith("works")
    shown = [] if any(word in ("-m", "--cfg", "--info") for word in words) or not works else ["--cfg", "job"]
    code = main([*words[1:], *shown])
    out, err = capsys.readouterr()
    assert code == (0 if works else 2), err
    assert said in (out if works else err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my"]
