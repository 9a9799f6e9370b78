"""The cells that docs/python.md shows run, one after the other, as in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dtf
from dtf.api import registry
from dtf.host import devices

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CELLS = [block for block in BLOCKS if not block.startswith("# train.py\n")]


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    dtf.compose()
    monkeypatch.setattr(registry, "_CLASSES", {group: dict(known) for group, known in registry._CLASSES.items()})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "cores", lambda: 1)
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert len(CELLS) > 6
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"<cell {number}>", "exec"), vars(notebook))
    said = capsys.readouterr().out
    assert "lr.peek=0.1 is no known key; did you mean peak?" in said and "width: 16" in said
    assert notebook.result.best.value > 0.9 and [step for step, _ in notebook.losses] == [32, 64]
    assert notebook.prediction["row"] == 3 and notebook.evaluation.rows == 4096 and not notebook.model.training


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/python.md", "README.md"])
def test_the_scripts_run(page: str, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    recipe = re.search(r"^```python\n(# my_recipe\.py\n.*?)^```", readme, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (script,) = (block for block in blocks if block not in CELLS)
    assert recipe
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "my_recipe.py").write_text(recipe[1])
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "best_top1=" in done.stdout, done.stderr
