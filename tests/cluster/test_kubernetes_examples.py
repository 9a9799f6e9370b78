"""examples/kubernetes holds what launcher=kubernetes makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes_examples import COMMAND, FOLDER, content

FILES = sorted(path for path in FOLDER.glob("*.yaml"))
MADE = [path for path in FILES if path.read_text().startswith(COMMAND)]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_an_example_is_what_its_command_prints(path: Path) -> None:
    assert path.read_text() == content(path), "write them anew: python -m tests.support.kubernetes_examples"


def test_all_examples_are_objects_and_are_told_of() -> None:
    assert len(MADE) == 5
    told = (FOLDER / "README.md").read_text()
    for path in FILES:
        assert f"[{path.name}]({path.name})" in told
        assert all(
            {"apiVersion", "kind", "metadata", "spec"} <= set(one) for one in yaml.safe_load_all(path.read_text())
        )
